"""The knowledge of a router that listens to no engine."""

from __future__ import annotations

from collections.abc import Sequence

from schedloom.core.routing import Candidate, Held


class NobodyTells:
    """Knows nothing of anybody's KV."""

    def of_prompt(self, candidate: Candidate, token_ids: Sequence[int], cache_salt: str | None) -> Held | None:
        return None

    def of_session(self, candidate: Candidate, session: str) -> Held | None:
        return None
