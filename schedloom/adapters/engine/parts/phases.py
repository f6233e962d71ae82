"""Phases: which kinds of requests may share a step's batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from schedloom.adapters.engine.scheduler import PolicyScheduler
from schedloom.core.decisions import StepPlan
from schedloom.core.views import BatchReport

Reserve = Callable[[Any, int, int], int]


class PhasesPart(PolicyScheduler):
    """The hook ``plan_step``.

    It stands where ``MeteringPart`` does, before that and only in steps that could mix: vLLM asks there how many tokens
    a request gets, and takes none as "not in this step".
    """

    HOOKS: ClassVar = ("plan_step",)

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._plan_step = self.caller("plan_step")
        self._plan: StepPlan | None = None
        self._left_out: set[StepPlan] = set()

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self.view.begin_step()
        self._left_out.clear()
        self._plan = next((plan for _, plan in self._plan_step.ask(self.view)), None)
        reserve: Reserve = self._reserve_prefill_lookahead
        if self._plan is not None and self._could_mix():
            self._reserve_prefill_lookahead = partial(self._in_phase, reserve)
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self._reserve_prefill_lookahead = reserve
        self.view.last_batch = self._report(output)
        return output

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """Put off who has his KV already and would decode: vLLM stops at one that gets no tokens, and passes this."""
        if not super()._handle_blocked_waiting_request(request):
            return False
        if self._plan is None or not request.num_computed_tokens:
            return True
        return self._may(_kind(request.num_tokens - request.num_computed_tokens))

    def _in_phase(self, reserve: Reserve, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        kind = _kind(request.num_tokens - num_computed_tokens)
        if not self._may(kind):
            return 0
        granted = reserve(request, num_computed_tokens, num_new_tokens)
        if granted:
            self._plan = kind
        return granted

    def _may(self, kind: StepPlan) -> bool:
        if self._plan is kind or self._plan is StepPlan.EITHER:
            return True
        self._left_out.add(kind)
        return False

    def _could_mix(self) -> bool:
        return bool(self.waiting or self.kv_holding_waiting or self._inflight_prefills)

    def _report(self, output: Any) -> BatchReport:
        left_out = self._left_out
        return BatchReport(
            len(output.num_scheduled_tokens), StepPlan.PREFILL in left_out, StepPlan.DECODE in left_out
        )


def _kind(tokens_left: int) -> StepPlan:
    return StepPlan.PREFILL if tokens_left > 1 else StepPlan.DECODE
