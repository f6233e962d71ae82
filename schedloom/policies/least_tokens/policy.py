"""The least work under way."""

from __future__ import annotations

from collections.abc import Sequence

from schedloom.core.claims import LOAD_SPREAD, Claims
from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy, ScoreSettings
from schedloom.core.routing import Candidate


class LeastTokens(Policy):
    """Prefers engines with few bytes of requests, and so few tokens, under way."""

    name = "least_tokens"
    Settings = ScoreSettings
    settings: ScoreSettings
    claims = Claims(owns=frozenset({LOAD_SPREAD}))

    @hookimpl
    def score_workers(self, candidates: Sequence[Candidate]) -> list[float]:
        most = max(candidate.in_flight_bytes for candidate in candidates) or 1
        return [1 - candidate.in_flight_bytes / most for candidate in candidates]
