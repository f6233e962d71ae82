"""Metering: how many prefill tokens a request may compute in one step."""

from __future__ import annotations

from typing import Any, ClassVar

from schedloom.adapters.engine.scheduler import PolicyScheduler
from schedloom.adapters.engine.views import VllmRequestView
from schedloom.core.decisions import StepOutcome


class MeteringPart(PolicyScheduler):
    """The hooks ``limit_tokens``, ``step_begin`` and ``step_end``.

    vLLM asks ``_reserve_prefill_lookahead`` for every request of every step, decodes too, so the limit stands in its
    way only in steps that can have prefill.
    """

    HOOKS: ClassVar = ("limit_tokens", "step_begin", "step_end")

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._limit = self.caller("limit_tokens")
        self._step_begin = self.caller("step_begin")
        self._step_end = self.caller("step_end")
        self._stock_reserve = super()._reserve_prefill_lookahead
        self._reserve_prefill_lookahead = self._stock_reserve
        self._last_end: float | None = None

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self._step_begin.tell(self.view)
        metered = self._limit.is_on and (self.waiting or self.kv_holding_waiting or self._inflight_prefills)
        self._reserve_prefill_lookahead = self._limited if metered else self._stock_reserve
        return super().schedule(throttle_prefills)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._step_end.is_on:
            self._end_step(scheduler_output)
        else:
            self._last_end = None
        return outputs

    def set_pause_state(self, pause_state: Any) -> None:
        super().set_pause_state(pause_state)
        self._last_end = None  # A pause is no step's time.

    def _end_step(self, scheduler_output: Any) -> None:
        now = self.view.clock()
        requests = len(scheduler_output.num_scheduled_tokens)
        drafts = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        prefill = scheduler_output.total_num_scheduled_tokens - requests - drafts
        seconds = None if self._last_end is None else now - self._last_end
        self._last_end = now if self.running else None
        if requests:
            self._step_end.tell(StepOutcome(requests, prefill, seconds), self.view)

    def _limited(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        left = request.num_tokens - num_computed_tokens
        if num_new_tokens and left > 1:
            num_new_tokens = self._allowed(request, num_computed_tokens, num_new_tokens)
        return self._stock_reserve(request, num_computed_tokens, num_new_tokens)  # type: ignore[no-any-return]

    def _allowed(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        view = VllmRequestView(request)
        limits = [limit for _, limit in self._limit.ask(view, num_new_tokens, self.view)]
        allowed: int = max(0, min([num_new_tokens, *limits]))
        if allowed and not self.scheduler_config.enable_chunked_prefill:
            return num_new_tokens
        if 0 < allowed < num_new_tokens and self.need_mamba_block_aligned_split:
            return min(num_new_tokens, self._to_end_of_block(num_computed_tokens, allowed))
        return allowed

    def _to_end_of_block(self, start: int, tokens: int) -> int:
        """A Mamba state is kept at the ends of blocks. Less than the first of them would be no progress at all."""
        size: int = self.cache_config.block_size
        return max((start + tokens) // size, start // size + 1) * size - start
