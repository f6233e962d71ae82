"""Ordering: in which order waiting requests are considered."""

from __future__ import annotations

from typing import Any, ClassVar

from schedloom.adapters.engine.queues import NO_LANE, LanedQueue
from schedloom.adapters.engine.scheduler import PolicyScheduler
from schedloom.adapters.engine.views import VllmRequestView
from schedloom.core.decisions import Lane
from schedloom.core.requirements import check_queue_order


class OrderingPart(PolicyScheduler):
    """The hook ``queue_key``: the scheduler gets a queue of lanes as soon as it is constructed."""

    HOOKS: ClassVar = ("queue_key",)

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        check_queue_order(self.policies.policies, self.policy.value)
        self._queue_key = self.caller("queue_key")
        self.waiting = self._lanes = LanedQueue(self._lane_of, lambda: self.view.now)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        if not self._queue_key.acts:
            self._lanes.level()
        try:
            return super().schedule(throttle_prefills)
        finally:
            self._lanes.reopen()

    def close_lane(self, request: Any) -> None:
        self._lanes.close_lane(request)

    def _lane_of(self, request: Any) -> Lane:
        self.view.forget()
        answer = next(self._queue_key.ask(VllmRequestView(request), self.view), None)
        self.view.forget()
        return NO_LANE if answer is None else answer[1]
