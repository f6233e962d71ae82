"""Admission and screening: asking the policies about waiting requests, and what becomes of the answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar

from schedloom.adapters.engine.hooks import HookCaller
from schedloom.adapters.engine.queues import HeldQueue
from schedloom.adapters.engine.scheduler import PolicyScheduler
from schedloom.adapters.engine.views import VllmRequestView, is_marked
from schedloom.core.decisions import Admission, Decision, Verdict

RECHECK_INTERVAL_STEPS = 4
"""A marked request that stays in the queue is screened again, one request every so many steps, in turn: a look-up
of a long prefix costs as much as a tenth of a scheduling step."""


class AdmissionPart(PolicyScheduler):
    """The hooks ``admit`` and ``screen``.

    The guards that no policy has to think of are here: only a request that is fresh (no KV, no output, never
    preempted) is asked about, and only a marked one can be turned away.
    """

    HOOKS: ClassVar = ("admit", "screen")

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._admit = self.caller("admit")
        self._screen = self.caller("screen")
        self._arrived: list[Any] = []
        self._queued: deque[Any] = deque()
        self._steps = 0
        self._admitting: dict[str, tuple[Any, Decision]] = {}
        self._put_off: dict[str, tuple[Verdict, str]] = {}

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        if self._screen.is_on and is_marked(request):
            self._arrived.append(request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        waiting = self.waiting
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.waiting = waiting
        self._steps += 1
        if self._admitting:
            self._record_admitted()
        if self._arrived or self._queued:
            self._screen_waiting()
        self.view.forget()
        return output

    def _free_request(self, request: Any, delay_free_blocks: bool = False) -> Any:
        self._put_off.pop(request.request_id, None)
        return super()._free_request(request, delay_free_blocks)

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        if not super()._handle_blocked_waiting_request(request):
            return False
        # A prompt of one token has none computed when its KV has arrived, and holds its blocks all the same.
        if not self._admit.is_on or not is_fresh(request) or self.view.has_blocks(request):
            return True
        return request.request_id not in self.turned_away and self._may_proceed(request)

    def _get_local_prefix_cache_hit(self, request: Any, *limits: Any, **named_limits: Any) -> Any:
        hit = self.view.take_hit(request)
        limited = any(limit is not None for limit in (*limits, *named_limits.values()))
        if hit is None or limited:
            return super()._get_local_prefix_cache_hit(request, *limits, **named_limits)
        return hit

    def _may_proceed(self, request: Any) -> bool:
        """Whether vLLM may go on to give ``request`` KV blocks in this iteration of its loop."""
        self.view.forget()
        verdict = self._judge(request, "admit", self._admit)
        if verdict is Verdict.HOLD:
            # vLLM's loop looks here anew for every request: it now sees only those that hold KV. Undone after the step.
            self.waiting = HeldQueue(self.waiting)
        return verdict is Verdict.ADMIT

    def _record_admitted(self) -> None:
        """An admission counts once, when the engine went through with it: it may lack the blocks for many steps."""
        for request, decision in self._admitting.values():
            if not self._is_waiting(request):
                self.decisions.record(decision)
        self._admitting.clear()

    def _screen_waiting(self) -> None:
        """Look at the marked requests that arrived since the last step, and now and then at one that still waits."""
        self.view.forget()
        for request in self._due():
            if request.request_id in self.turned_away or not self._is_waiting(request):
                continue
            if self._judge(request, "screen", self._screen) is not Verdict.REJECT:
                self._queued.append(request)

    def _due(self) -> Iterator[Any]:
        if self._queued and self._steps % RECHECK_INTERVAL_STEPS == 0:
            yield self._queued.popleft()
        arrived, self._arrived = self._arrived, []
        yield from arrived

    def _is_waiting(self, request: Any) -> bool:
        return is_fresh(request) and not request.is_finished() and not self.view.has_blocks(request)

    def _judge(self, request: Any, name: str, hook: HookCaller) -> Verdict:
        """The strictest verdict of all, for a whole lane if one of them says so. A rejection is carried out."""
        view = VllmRequestView(request)
        policy, strictest = "", Admission(Verdict.ADMIT)
        for candidate, answer in hook.ask(view, self.view):
            if not policy or _reach(answer) > _reach(strictest):
                policy, strictest = candidate, answer
        if not policy:
            return Verdict.ADMIT
        decision = Decision(view.request_id, policy, name, strictest.verdict.name, strictest.reason, strictest.facts)
        return self._carry_out(request, strictest, decision)

    def _carry_out(self, request: Any, answer: Admission, decision: Decision) -> Verdict:
        if answer.verdict is not Verdict.REJECT:
            if decision.hook == "admit":
                self._let_in_or_put_off(request, answer, decision)
            return answer.verdict
        if not is_marked(request):
            return Verdict.ADMIT
        self.turned_away[request.request_id] = answer.reason
        self.decisions.record(decision)
        return Verdict.REJECT

    def _let_in_or_put_off(self, request: Any, answer: Admission, decision: Decision) -> None:
        if answer.verdict is Verdict.ADMIT:
            self._admitting[request.request_id] = (request, decision)
            return
        if answer.whole_lane and answer.verdict is Verdict.DEFER:
            self.close_lane(request)
        # A request may be put off in every one of many steps: it counts again when the reason has changed.
        if self._put_off.get(request.request_id) != (answer.verdict, answer.reason):
            self._put_off[request.request_id] = (answer.verdict, answer.reason)
            self.decisions.record(decision)


def _reach(answer: Admission) -> tuple[Verdict, bool]:
    return answer.verdict, answer.whole_lane


def is_fresh(request: Any) -> bool:
    """Whether ``request`` holds nothing yet: no computed tokens, no output, no preemption behind it."""
    return not (request.num_computed_tokens or request.num_preemptions or request.num_output_tokens)
