"""Asking the policies about waiting requests, and what becomes of the answers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

from schedloom.adapters.engine.views import VllmEngineView, VllmRequestView, is_marked
from schedloom.core.composition import Hook, PolicySet
from schedloom.core.decisions import Admission, Decision, DecisionSink, Verdict

RECHECK_INTERVAL_STEPS = 4
"""A marked request that stays in the queue is screened again, one request every so many steps, in turn: a look-up
of a long prefix costs as much as a tenth of a scheduling step."""

logger = logging.getLogger("vllm.schedloom")


class Admissions:
    """Admission and screening of one scheduler's waiting requests, and the requests that are to be turned away.

    The guards that no policy has to think of are here: only a request that is fresh (no KV, no output, never
    preempted) is asked about, and only a marked one can be turned away.
    """

    def __init__(self, policies: PolicySet, view: VllmEngineView, sink: DecisionSink) -> None:
        self._admit = policies.of("admit")
        self._screen = policies.of("screen")
        self._view = view
        self._sink = sink
        self._arrived: list[Any] = []
        self._queued: deque[Any] = deque()
        self._steps = 0
        self._admitting: dict[str, tuple[Any, Decision]] = {}
        self._broken: set[tuple[str, str]] = set()
        self.rejected: dict[str, str] = {}

    def arrive(self, request: Any) -> None:
        if self._screen and is_marked(request):
            self._arrived.append(request)

    def may_proceed(self, request: Any) -> bool:
        """Whether vLLM may go on to give ``request`` KV blocks in this iteration of its loop."""
        if not self._admit or not is_fresh(request):
            return True
        if request.request_id in self.rejected:
            return False
        self._view.forget()
        return not self._turn_away(request, "admit", self._admit)

    def end_step(self) -> None:
        """Once after every step: record who was admitted, and screen the queue.

        Screened are the marked requests that arrived since the last step, and now and then one that still waits.
        """
        self._record_admitted()
        self._view.forget()
        for request in self._due():
            if request.request_id in self.rejected or not self._is_waiting(request):
                continue
            if not self._turn_away(request, "screen", self._screen):
                self._queued.append(request)
        self._view.forget()

    def _record_admitted(self) -> None:
        """An admission counts once, when the engine went through with it: it may lack the blocks for many steps."""
        for request, decision in self._admitting.values():
            if not self._is_waiting(request):
                self._sink.record(decision)
        self._admitting.clear()

    def _due(self) -> Iterator[Any]:
        self._steps += 1
        if self._queued and self._steps % RECHECK_INTERVAL_STEPS == 0:
            yield self._queued.popleft()
        arrived, self._arrived = self._arrived, []
        yield from arrived

    def _is_waiting(self, request: Any) -> bool:
        return is_fresh(request) and not request.is_finished() and not self._view.has_blocks(request)

    def _turn_away(self, request: Any, name: str, hooks: tuple[Hook, ...]) -> bool:
        view = VllmRequestView(request)
        for hook in hooks:
            answer = self._ask(hook, name, view)
            if answer is None:
                continue
            decision = _decision(view, hook, name, answer)
            if answer.verdict is Verdict.REJECT and view.is_local_attempt:
                self.rejected[view.request_id] = answer.reason
                self._sink.record(decision)
                return True
            if name == "admit":
                self._admitting[view.request_id] = (request, decision)
        return False

    def _ask(self, hook: Hook, name: str, request: VllmRequestView) -> Admission | None:
        """A policy that raises has no opinion: the request gets vLLM's own behaviour, and the log says so once."""
        try:
            return hook.call(request, self._view)  # type: ignore[no-any-return]
        except Exception:
            if (hook.policy, name) not in self._broken:
                self._broken.add((hook.policy, name))
                logger.exception("policy %s raised in %s; it is ignored where it raises", hook.policy, name)
            return None


def is_fresh(request: Any) -> bool:
    """Whether ``request`` holds nothing yet: no computed tokens, no output, no preemption behind it."""
    return not (request.num_computed_tokens or request.num_preemptions or request.num_output_tokens)


def _decision(view: VllmRequestView, hook: Hook, name: str, answer: Admission) -> Decision:
    return Decision(view.request_id, hook.policy, name, answer.verdict.name, answer.reason, answer.facts)
