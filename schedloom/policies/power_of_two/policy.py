"""The better of two."""

from __future__ import annotations

from collections.abc import Sequence

from schedloom.core.claims import LOAD_SPREAD, Claims
from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy, ScoreSettings
from schedloom.core.routing import Candidate, RoutingView


class PowerOfTwo(Policy):
    """Prefers the less busy of two engines drawn at random."""

    name = "power_of_two"
    Settings = ScoreSettings
    settings: ScoreSettings
    claims = Claims(owns=frozenset({LOAD_SPREAD}))

    @hookimpl
    def score_workers(self, candidates: Sequence[Candidate], view: RoutingView) -> list[float]:
        drawn = view.random.sample(range(len(candidates)), min(2, len(candidates)))
        best = min(drawn, key=lambda place: candidates[place].in_flight)
        return [1.0 if place == best else 0.5 if place in drawn else 0.0 for place in range(len(candidates))]
