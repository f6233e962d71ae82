"""Engines that answer in time."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, Final

from pydantic import Field

from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy, ScoreSettings
from schedloom.core.routing import AttemptReport, Candidate, Ending, Leg, RouteRequest
from schedloom.policies.ttft_slo.pace import Pace

HINT: Final = "ttft-slo-ms"
_MOST_PLACES: Final = 10_000

_Place = tuple[Leg, str, str, int]


class TtftSloSettings(ScoreSettings):
    """What holds for requests that say nothing themselves."""

    default_ms: Annotated[float, Field(gt=0)] | None = None
    """Milliseconds to the first token of a request without the header; without it such a request has no bound."""


class TtftSlo(Policy):
    """Keeps to the engines that are expected to produce the first token within the request's bound."""

    name = "ttft_slo"
    Settings = TtftSloSettings
    settings: TtftSloSettings

    def __init__(self, settings: TtftSloSettings | None = None) -> None:
        super().__init__(settings)
        self._paces: OrderedDict[_Place, Pace] = OrderedDict()

    @hookimpl
    def filter_workers(
        self, request: RouteRequest, leg: Leg, candidates: Sequence[Candidate]
    ) -> list[Candidate] | None:
        bound = self._bound(request)
        if bound is None or leg is Leg.APPEND:
            return None
        return [one for one in candidates if self._expected(request, leg, one) <= bound]

    @hookimpl
    def score_workers(self, request: RouteRequest, leg: Leg, candidates: Sequence[Candidate]) -> list[float] | None:
        if self._bound(request) is None:
            return None
        expected = [self._expected(request, leg, one) for one in candidates]
        soonest = min(expected)
        return [1.0 if seconds <= soonest else soonest / seconds for seconds in expected]

    @hookimpl
    def attempt_finished(self, request: RouteRequest, report: AttemptReport) -> None:
        if report.first_byte is None or report.ending is not Ending.ANSWERED:
            return
        pace = self._paces.setdefault(_place(report.leg, report.candidate), Pace())
        pace.learn(report.bytes_before + request.body_bytes, report.first_byte)
        if len(self._paces) > _MOST_PLACES:
            self._paces.popitem(last=False)

    def _bound(self, request: RouteRequest) -> float | None:
        """Seconds."""
        try:
            asked = float(request.hints[HINT])
        except (KeyError, ValueError):
            asked = math.nan
        bound = asked if asked > 0 else self.settings.default_ms
        return None if bound is None else bound / 1000

    def _expected(self, request: RouteRequest, leg: Leg, candidate: Candidate) -> float:
        """Seconds to the first byte; none where nothing is known yet, so that everybody is tried once."""
        pace = self._paces.get(_place(leg, candidate))
        return 0.0 if pace is None else pace.expected(candidate.in_flight_bytes + request.body_bytes)


def _place(leg: Leg, candidate: Candidate) -> _Place:
    return leg, candidate.name, candidate.contract.epoch, candidate.rank
