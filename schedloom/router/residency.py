"""Which KV the engines say they hold."""

from __future__ import annotations

from collections.abc import Sequence

from schedloom.core.routing import Candidate


class NobodyTells:
    """The knowledge of a router that listens to no engine."""

    def tokens(self, candidate: Candidate, token_ids: Sequence[int], cache_salt: str | None) -> int | None:
        return None
