"""A prefix cache that holds nothing but what was computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Base
else:
    _Base = object


class ExactCache(_Base):
    """Goes around a fault of vLLM, which its pull request 43569 is to mend.

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
