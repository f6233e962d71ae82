"""Phases: which kinds of requests may share a step's batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from heapq import nsmallest
from itertools import count
from typing import Any, ClassVar

from schedloom.adapters.engine.scheduler import PolicyScheduler
from schedloom.adapters.engine.views import is_prefilling
from schedloom.core.decisions import Phase, StepPlan
from schedloom.core.views import BatchReport

Reserve = Callable[[Any, int, int], int]


class PhasesPart(PolicyScheduler):
    """The hook ``plan_step``.

    vLLM asks ``_reserve_prefill_lookahead`` how many tokens a request gets, and takes none as "not in this step". The
    plan stands in its way, before ``MeteringPart``, and only in steps that could break the plan.
    """

    HOOKS: ClassVar = ("plan_step",)

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._plan_step = self.caller("plan_step")
        self._turns = Turns()
        self._phase: Phase | None = None
        self._left_out: set[Phase] = set()

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self._left_out.clear()
        plan = next((plan for _, plan in self._plan_step.ask(self.view)), None)
        self._phase = plan.phase if plan else None
        reserve = self._reserve_prefill_lookahead
        if plan and self._could_break(plan):
            self._turns.begin(plan, self.running)
            self._reserve_prefill_lookahead = partial(self._in_phase, reserve)
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self._reserve_prefill_lookahead = reserve
        self.view.last_batch = self._report(len(output.num_scheduled_tokens))
        return output

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """Pass who holds KV and is left out: where such a request gets no tokens, vLLM looks at nobody behind it."""
        if not super()._handle_blocked_waiting_request(request):
            return False
        return not request.num_computed_tokens or self._may(_phase_of(request.num_tokens - request.num_computed_tokens))

    def _in_phase(self, reserve: Reserve, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        phase = _phase_of(request.num_tokens - num_computed_tokens)
        if not self._may(phase) or (phase is Phase.DECODE and not self._turns.has(request)):
            return 0
        granted = reserve(request, num_computed_tokens, num_new_tokens)
        if granted:
            self._phase = phase
            self._turns.take()
        return granted

    def _may(self, phase: Phase) -> bool:
        if self._phase in (phase, Phase.EITHER, None):
            return True
        self._left_out.add(phase)
        return False

    def _could_break(self, plan: StepPlan) -> bool:
        more_may_come = self.waiting or self.kv_holding_waiting or self._inflight_prefills
        return bool(more_may_come) or len(self.running) > (plan.max_decodes or sys.maxsize)

    def _report(self, requests: int) -> BatchReport:
        return BatchReport(requests, Phase.PREFILL in self._left_out, Phase.DECODE in self._left_out)


class Turns:
    """Who may decode where not everybody can: those who have not for the longest time."""

    def __init__(self) -> None:
        self._count = count(1)
        self._last: dict[str, int] = {}
        self._chosen: set[str] | None = None
        self._rows = 0

    def begin(self, plan: StepPlan, running: list[Any]) -> None:
        """Choose for a step of ``plan``; one without decodes takes no turn from anybody."""
        self._rows = plan.max_decodes or sys.maxsize
        self._chosen = None
        if plan.phase is not Phase.PREFILL and len(running) > self._rows:
            self._choose([request.request_id for request in running if not is_prefilling(request)])

    def has(self, request: Any) -> bool:
        return self._rows > 0 and (self._chosen is None or request.request_id in self._chosen)

    def take(self) -> None:
        self._rows -= 1

    def _choose(self, decoding: list[str]) -> None:
        if len(decoding) <= self._rows:
            return
        self._last = {request: self._last.get(request, 0) for request in decoding}
        chosen = nsmallest(self._rows, decoding, key=self._last.__getitem__)
        self._last.update(zip(chosen, self._count, strict=False))
        self._chosen = set(chosen)


def _phase_of(tokens_left: int) -> Phase:
    return Phase.PREFILL if tokens_left > 1 else Phase.DECODE
