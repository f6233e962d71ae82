"""What befell an engine: seen in the steps that its scheduler made, and in who was asked."""

from __future__ import annotations

from collections import Counter
from typing import Any

from schedloom.adapters.engine.hooks import HookCaller


class Witness:
    """Counts events. ``NAME asked`` counts the calls of a policy's hooks."""

    def __init__(self, scheduler: Any) -> None:
        self.events: Counter[str] = Counter()
        self.steps = 0
        self._scheduler = scheduler
        self._preempted: set[str] = set()
        self._schedule, scheduler.schedule = scheduler.schedule, self._watched
        self._listen()

    def _listen(self) -> None:
        call = HookCaller._call

        def counted(caller: HookCaller, hook: Any, arguments: Any) -> Any:
            self.events[f"{hook.policy} asked"] += 1
            return call(caller, hook, arguments)

        HookCaller._call = counted  # type: ignore[method-assign, assignment]

    def _watched(self, *arguments: Any) -> Any:
        output = self._schedule(*arguments)
        self.steps += bool(output.num_scheduled_tokens)
        for new in output.scheduled_new_reqs:
            self._saw_new(new)
        resumed = self._preempted & output.num_scheduled_tokens.keys()
        self.events["resumed"] += len(resumed)
        self._preempted -= resumed
        self._preempted |= output.preempted_req_ids or set()
        self.events["preempted"] += len(output.preempted_req_ids or ())
        self.events["chunk"] += sum(map(self._has_prompt_left, output.num_scheduled_tokens))
        return output

    def _saw_new(self, new: Any) -> None:
        request = self._scheduler.requests[new.req_id]
        if request.prefill_stats is not None and not request.num_preemptions:
            self.events["prefix hit"] += bool(request.prefill_stats.num_local_cached_tokens)
            self.events["pulled"] += bool(request.prefill_stats.num_external_cached_tokens)

    def _has_prompt_left(self, request_id: str) -> bool:
        request = self._scheduler.requests[request_id]
        return bool(request.num_computed_tokens < request.num_prompt_tokens)

    def all_events(self) -> Counter[str]:
        """Those, and how often each verdict of each policy was carried out."""
        counts = self.events.copy()
        if hasattr(self._scheduler, "decisions"):
            for (policy, _, verdict, _), number in self._scheduler.decisions.counts.items():
                counts[f"{policy} {verdict}"] += number
        return counts

    def failures(self) -> list[str]:
        """The policies that raised, with the hook and the kind of error."""
        counts: Counter[Any] = sum((caller.counts for caller in getattr(self._scheduler, "_callers", ())), Counter())
        return [
            f"policy {policy} raised {kind} in {hook}" for policy, hook, outcome, kind in counts if outcome == "FAILED"
        ]
