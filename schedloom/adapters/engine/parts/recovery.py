"""Recovery: what becomes of the KV of a request that is preempted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from schedloom.adapters.engine.scheduler import PolicyScheduler
from schedloom.adapters.engine.views import VllmRequestView
from schedloom.core.decisions import Decision, Recovery


class RecoveryPart(PolicyScheduler):
    """The hook ``recover``."""

    HOOKS: ClassVar = ("recover",)

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._recover = self.caller("recover")
        self._resetting = False
        for store in preemption_stores(self.connector):
            if hasattr(store, "observe_preempted"):
                store.observe_preempted(self._record_store)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """vLLM's own, which also forgets all saved KV: it may have been computed with weights that are gone."""
        for store in preemption_stores(self.connector):
            store.discard_preempted()
        self._resetting = True
        try:
            return bool(super().reset_prefix_cache(reset_running_requests, reset_connector))
        finally:
            self._resetting = False

    def _preempt_request(self, request: Any, timestamp: float, **keywords: Any) -> None:
        if not self._resetting:
            self._take_first_possible_way(request)
        super()._preempt_request(request, timestamp, **keywords)

    def _take_first_possible_way(self, request: Any) -> None:
        view = VllmRequestView(request)
        for policy, ways in self._recover.ask(view, self.view):
            way = next((way for way in ways if self._take(request, way)), Recovery.RECOMPUTE)
            facts = {"computed_tokens": request.num_computed_tokens, "output_tokens": view.num_output_tokens}
            self.decisions.record(Decision(view.request_id, policy, "recover", way.name, way.value, facts))
            return

    def _record_store(self, request_id: str, event: str, num_tokens: int) -> None:
        facts = {"tokens": num_tokens}
        self.decisions.record(Decision(request_id, "preempt_offload", "store", event.upper(), event, facts))

    def _take(self, request: Any, way: Recovery) -> bool:
        return way is Recovery.RECOMPUTE or self._save(request)

    def _save(self, request: Any) -> bool:
        block_ids = self.kv_cache_manager.get_block_ids(request.request_id)
        tokens = confirmed_tokens(request)
        return any(
            store.update_state_before_preempt(request, block_ids, tokens) for store in preemption_stores(self.connector)
        )


def confirmed_tokens(request: Any) -> int:
    """Tokens whose KV is certain: computed by steps that have returned, and not of a draft that may be rejected."""
    confirmed: int = min(request.num_computed_tokens - request.num_output_placeholders, request.num_tokens - 1)
    return max(0, confirmed)


def preemption_stores(connector: Any) -> Iterator[Any]:
    """The connectors, ``connector`` itself or those that it combines, that can save a preempted request."""
    for candidate in (connector, *getattr(connector, "sub_connectors", ())):
        if hasattr(candidate, "update_state_before_preempt"):
            yield candidate
            return
