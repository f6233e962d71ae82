"""vLLM's scheduler without faults that are known of it: what composed schedulers stand on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Base
else:
    _Base = object


class ExactCache(_Base):
    """A prefix cache that holds nothing but what was computed, which vLLM's pull request 43569 is to see to.

    ``allocate_slots`` puts blocks into the prefix cache before they are computed. With priority scheduling a request
    may be preempted in the very step that has just given it tokens: they are never computed, and their blocks stay in
    the cache. Whoever hits one reads what somebody else left in it.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._cache_groups = self.kv_cache_manager.coordinator.single_type_managers

    def _preempt_request(self, request: Any, timestamp: float, **keywords: Any) -> None:
        self._forget_uncomputed(request)
        super()._preempt_request(request, timestamp, **keywords)

    def _forget_uncomputed(self, request: Any) -> None:
        """Steps in flight count as computed: their work is done before that of any step to come."""
        for manager in self._cache_groups:
            start = request.num_computed_tokens // manager.block_size
            blocks = manager.req_to_blocks.get(request.request_id, ())[start:]
            manager.block_pool.evict_blocks({block.block_id for block in blocks if block.block_hash is not None})


class CountedAdapters(_Base):
    """No more adapters among those that run than a batch may hold.

    vLLM counts the adapters of a step when it admits somebody. Those who run and are left out of that step, because
    their last tokens are in flight or blocks are waited for, are not counted; once everybody is in a step again it
    holds too many, and ``schedule()`` raises.
    """

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        return bool(super()._handle_blocked_waiting_request(request)) and self.adapter_fits(request)

    def adapter_fits(self, request: Any) -> bool:
        """Whether the adapters of all that runs leave room for this request's."""
        if not self.lora_config or not request.lora_request:
            return True
        ids = {running.lora_request.lora_int_id for running in self.running if running.lora_request}
        return request.lora_request.lora_int_id in ids or len(ids) < self.lora_config.max_loras


class Mended(ExactCache, CountedAdapters):
    """All of them."""
