"""The engine that saw the prompt's beginning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from schedloom.core.claims import PREFIX_CHOICE, Claims
from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy, ScoreSettings
from schedloom.core.routing import AttemptReport, Candidate, RouteRequest
from schedloom.policies.prefix_aware.table import PrefixTable


class PrefixAwareSettings(ScoreSettings):
    """How much is remembered, and how much more load a prefix is worth."""

    max_blocks: Annotated[int, Field(ge=1)] = 200_000
    """Blocks of 1,024 bytes that are remembered, over all prompts."""

    max_lead: Annotated[int, Field(ge=0)] = 16
    """Requests that an engine may have under way beyond the least busy one and still be preferred for its prefix."""


class PrefixAware(Policy):
    """Prefers the engines that have seen the longest part of the prompt from its beginning."""

    name = "prefix_aware"
    Settings = PrefixAwareSettings
    settings: PrefixAwareSettings
    claims = Claims(owns=frozenset({PREFIX_CHOICE}))

    def __init__(self, settings: PrefixAwareSettings | None = None) -> None:
        super().__init__(settings)
        self._table = PrefixTable(self.settings.max_blocks)

    @hookimpl
    def score_workers(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[float] | None:
        blocks = request.prefix_blocks
        if not blocks:
            return None
        limit = min(candidate.in_flight for candidate in candidates) + self.settings.max_lead
        matches = self._table.matches(blocks, candidates)
        return [
            match / len(blocks) if candidate.in_flight <= limit else 0.0
            for match, candidate in zip(matches, candidates, strict=True)
        ]

    @hookimpl
    def attempt_finished(self, request: RouteRequest, report: AttemptReport) -> None:
        self._table.learn(request.prefix_blocks, report)
