"""Never prefill and decode in one batch, and fit batches to the sizes that are compiled."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from schedloom.core.decisions import Admission, Phase, StepPlan, Verdict
from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy, PolicySettings
from schedloom.core.views import EngineView, RequestView
from schedloom.policies.phase_separation.buckets import fitting_tokens

RETRY_STEPS = 8
"""Decode steps before prefill is tried again after a prefill step in which nothing fitted."""

Buckets = Annotated[tuple[Annotated[int, Field(ge=1)], ...], AfterValidator(lambda sizes: tuple(sorted(set(sizes))))]


class PhaseSeparationSettings(PolicySettings):
    """How the phases alternate, and which batch sizes there are."""

    prefill_steps: Annotated[int, Field(ge=1)] = 1
    """Prefill steps in a row while somebody waits to decode."""

    decode_steps: Annotated[int, Field(ge=1)] = 1
    """Decode steps in a row while somebody waits for prefill."""

    prefill_token_buckets: Buckets = ()
    """Compiled sizes of prefill batches, in tokens; none leaves the size to vLLM."""

    decode_batch_buckets: Buckets = ()
    """Compiled sizes of decode batches, in requests; none leaves the size to vLLM."""

    max_padding: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of a prefill bucket that may be padding; a batch that would need more is cut to the bucket below."""


class PhaseSeparation(Policy):
    """Alternates between prefill and decode while both wait, and lets either have every step otherwise."""

    name = "phase_separation"
    Settings = PhaseSeparationSettings
    conformance_never_rejects = True
    settings: PhaseSeparationSettings
    conformance_settings = PhaseSeparationSettings(prefill_token_buckets=(8, 32), decode_batch_buckets=(2, 4))

    def __init__(self, settings: PhaseSeparationSettings | None = None) -> None:
        super().__init__(settings)
        self._phase = Phase.EITHER
        self._steps = 0
        self._held: str | None = None
        self._held_now = False
        self._decode_steps = self.settings.decode_steps
        self._tokens = 0

    @hookimpl
    def plan_step(self, view: EngineView) -> StepPlan:
        phase = self._next_phase(view)
        self._steps = self._steps + 1 if phase is self._phase else 1
        self._phase, self._tokens, self._held_now = phase, 0, False
        buckets = self.settings.decode_batch_buckets
        return StepPlan(phase, buckets[-1] if buckets else None)

    @hookimpl
    def admit(self, request: RequestView, view: EngineView) -> Admission | None:
        """In a decode step nobody behind the first request that needs prefill is looked at; it is looked up once."""
        if self._phase is not Phase.DECODE:
            return None
        if self._held != request.request_id and not _needs_prefill(request, view):
            return None
        self._held, self._held_now = request.request_id, True
        return Admission(Verdict.HOLD, "decode_step")

    @hookimpl
    def limit_tokens(self, request: RequestView, tokens: int, view: EngineView) -> int | None:
        buckets = self.settings.prefill_token_buckets
        if not buckets or buckets[-1] < view.block_size:
            return None
        granted = fitting_tokens(self._tokens, tokens, buckets, self.settings.max_padding)
        self._tokens += granted
        return granted

    def _next_phase(self, view: EngineView) -> Phase:
        last = view.last_batch
        if self._phase is Phase.PREFILL:
            self._decode_steps = self.settings.decode_steps if last.requests else RETRY_STEPS
        if not (view.num_prefilling or self._held_now or last.left_out_prefill):
            return Phase.DECODE if view.num_decoding else Phase.EITHER
        if not (view.num_decoding or last.left_out_decode):
            return Phase.PREFILL
        if view.prefill_throttled and view.num_decoding:
            return Phase.DECODE
        return self._alternate(nothing_fitted=not last.requests)

    def _alternate(self, nothing_fitted: bool) -> Phase:
        prefill = self._phase is Phase.PREFILL
        bound = self.settings.prefill_steps if prefill else self._decode_steps
        if self._phase is not Phase.EITHER and self._steps < bound and not nothing_fitted:
            return self._phase
        return Phase.DECODE if prefill else Phase.PREFILL


def _needs_prefill(request: RequestView, view: EngineView) -> bool:
    return view.reusable_kv(request).known_tokens < request.num_prompt_tokens - 1
