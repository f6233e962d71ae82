"""The least new prefill beside the fewest others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from schedloom.core.claims import LOAD_SPREAD, PREFIX_CHOICE, Claims
from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy, ScoreSettings
from schedloom.core.routing import PREFIX_BLOCK_BYTES, AttemptReport, Candidate, RouteRequest
from schedloom.policies.prefix_aware.table import PrefixTable


class PrefillCostSettings(ScoreSettings):
    """How much is remembered."""

    max_blocks: Annotated[int, Field(ge=1)] = 200_000
    """Blocks of 1,024 bytes that are remembered, over all prompts."""


class PrefillCost(Policy):
    """Prefers where the prefill that is new there, times the requests that it would run beside, is least."""

    name = "prefill_cost"
    Settings = PrefillCostSettings
    settings: PrefillCostSettings
    claims = Claims(owns=frozenset({LOAD_SPREAD, PREFIX_CHOICE}))

    def __init__(self, settings: PrefillCostSettings | None = None) -> None:
        super().__init__(settings)
        self._table = PrefixTable(self.settings.max_blocks)

    @hookimpl
    def score_workers(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[float]:
        matches = self._table.matches(request.prefix_blocks, candidates)
        costs = [
            max(request.body_bytes - match * PREFIX_BLOCK_BYTES, 1) * (candidate.in_flight + 1)
            for match, candidate in zip(matches, candidates, strict=True)
        ]
        return [min(costs) / cost for cost in costs]

    @hookimpl
    def attempt_finished(self, request: RouteRequest, report: AttemptReport) -> None:
        self._table.learn(request.prefix_blocks, report)
