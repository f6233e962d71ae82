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
        wanted: dict[Recovery, str] = {}
        for policy, ways in self._recover.ask(view, self.view):
            wanted = {**dict.fromkeys((*ways, Recovery.RECOMPUTE), policy), **wanted}
        if not wanted:
            return
        way, reason = self._first_possible(request, [way for way in Recovery if way in wanted])
        facts = {"computed_tokens": request.num_computed_tokens, "output_tokens": view.num_output_tokens}
        self.decisions.record(Decision(view.request_id, wanted[way], "recover", way.name, reason, facts))

    def _first_possible(self, request: Any, ways: list[Recovery]) -> tuple[Recovery, str]:
        """The way that was taken, and its name or what stood against the one before it."""
        obstacle = None
        for way in ways[:-1]:
            earlier, obstacle = obstacle, self._take(request, way)
            if obstacle is None:
                return way, earlier or way.value
        return ways[-1], obstacle or ways[-1].value

    def _record_store(self, request_id: str, event: str, num_tokens: int) -> None:
        facts = {"tokens": num_tokens}
        self.decisions.record(Decision(request_id, "preempt_offload", "store", event.upper(), event, facts))

    def _take(self, request: Any, way: Recovery) -> str | None:
        """``None`` when ``request`` goes that way, otherwise why it cannot."""
        return self.hand_back(request) if way is Recovery.RETURN else self._save(request)

    def _save(self, request: Any) -> str | None:
        block_ids = self.kv_cache_manager.get_block_ids(request.request_id)
        tokens = confirmed_tokens(request)
        stores = preemption_stores(self.connector)
        saved = any(store.update_state_before_preempt(request, block_ids, tokens) for store in stores)
        return None if saved else "not_saved"


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
