"""Cut prefill into chunks so that the streams that share its steps keep their pace."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schedloom.core.decisions import StepOutcome
from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy, PolicySettings, Requirements
from schedloom.core.views import EngineView, RequestView
from schedloom.policies.tpot_guard.cost import StepCost


class TpotGuardSettings(PolicySettings):
    """How fast streams shall stay."""

    tpot_ms: Annotated[float, Field(gt=0)] = 50.0
    """Milliseconds that a step with streams in it should not exceed."""

    min_chunk_tokens: Annotated[int, Field(ge=1)] = 32
    """Tokens that a step may prefill all the same, so that prefill always goes on; also the very first chunk."""


class TpotGuard(Policy):
    """Meters prefill by a cost model that learns from every step."""

    name = "tpot_guard"
    Settings = TpotGuardSettings
    conformance_settings = TpotGuardSettings(min_chunk_tokens=4, tpot_ms=0.01)
    settings: TpotGuardSettings
    requires = Requirements(chunked_prefill=True)

    def __init__(self, settings: TpotGuardSettings | None = None) -> None:
        super().__init__(settings)
        self.cost = StepCost()
        self._left: int | None = None

    @hookimpl
    def step_begin(self) -> None:
        self._left = None

    @hookimpl
    def limit_tokens(self, request: RequestView, tokens: int, view: EngineView) -> int | None:
        if not view.num_decoding:
            return None
        return self._grant(tokens)

    @hookimpl
    def step_end(self, outcome: StepOutcome) -> None:
        if outcome.seconds is not None:
            self.cost.learn(outcome.prefill_tokens, outcome.seconds)

    def _grant(self, tokens: int) -> int:
        left = self._room() if self._left is None else self._left
        granted = min(tokens, left)
        self._left = left - granted
        return granted

    def _room(self) -> int:
        """What all of a step's prefill may take. Most steps have none, and nobody asks."""
        allowed = self.cost.tokens_within(self.settings.tpot_ms / 1000)
        return max(allowed or 0, self.settings.min_chunk_tokens)
