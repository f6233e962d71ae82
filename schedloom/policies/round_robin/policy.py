"""Each engine in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from schedloom.core.claims import LOAD_SPREAD, Claims
from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy, ScoreSettings
from schedloom.core.routing import Candidate, Leg


class RoundRobin(Policy):
    """Prefers the engine, and the rank of it, whose turn it is, and after it those that come next."""

    name = "round_robin"
    Settings = ScoreSettings
    settings: ScoreSettings
    claims = Claims(owns=frozenset({LOAD_SPREAD}))

    def __init__(self, settings: ScoreSettings | None = None) -> None:
        super().__init__(settings)
        self._turns: Counter[Leg] = Counter()

    @hookimpl
    def score_workers(self, leg: Leg, candidates: Sequence[Candidate]) -> list[float]:
        count, turn = len(candidates), self._turns[leg]
        self._turns[leg] += 1
        return [1 - (place - turn) % count / count for place in range(count)]
