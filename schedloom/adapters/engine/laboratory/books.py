"""What can be seen of a scheduler between its steps: requests, block tables, reference counts."""

from __future__ import annotations

from itertools import chain
from typing import Any

from vllm.v1.request import RequestStatus

from schedloom.adapters.engine.laboratory.pins import PinnedPool


class Books:
    """Reads one scheduler.

    ``held`` are blocks that the laboratory itself has taken from the pool, ``pins`` those that a connector has.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.held: list[Any] = []
        self.pins = PinnedPool(self._pool)
        if scheduler.connector is not None:
            scheduler.connector.bind_gpu_block_pool(self.pins)

    @property
    def _pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def _tables(self) -> list[dict[str, list[Any]]]:
        """Of each KV cache group, the blocks of each request."""
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        return [manager.req_to_blocks for manager in managers]

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_free_blocks(self) -> int:
        return self._pool.get_num_free_blocks()  # type: ignore[no-any-return]

    def phase(self, request_id: str) -> str | None:
        """waiting, running, preempted, transfer or finished; None for a request that the engine does not know."""
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return None
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return "transfer"
        return "finished" if request.is_finished() else request.status.name.lower()

    def known_requests(self) -> list[str]:
        return list(self.scheduler.requests)

    def blocks_of(self, request_id: str) -> tuple[list[int], ...]:
        """Of each KV cache group, in the order of tokens; 0 stands where a group needs no block."""
        blocks: tuple[list[int], ...] = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        return blocks

    def references(self) -> list[int]:
        """How many owners each block says it has; none for the null block, which may stand in any table."""
        counts = [block.ref_cnt for block in self._pool.blocks]
        counts[self._pool.null_block.block_id] = 0
        return counts

    def census(self) -> tuple[int, dict[int, tuple[int, int]]]:
        """How many blocks say that nobody owns them, and the blocks that are wrong about their owners: what they say,
        and how many own them."""
        references = self.references()
        excess = references.copy()
        deferred = [blocks for _, blocks in self.scheduler.deferred_frees]
        tables = chain.from_iterable(table.values() for table in self._tables)
        for blocks in (*tables, *deferred, self.held, self.pins.pinned):
            for block in blocks:
                excess[block.block_id] -= 1
        excess[self._pool.null_block.block_id] = 0
        wrong = [block for block, more in enumerate(excess) if more] if any(excess) else []
        uneven = {block: (references[block], references[block] - excess[block]) for block in wrong}
        return references.count(0) - 1, uneven

    def orphans(self) -> list[str]:
        """Requests that own KV blocks and no longer exist."""
        requests = self.scheduler.requests
        owners = [name for table in self._tables for name, blocks in table.items() if blocks]
        return [name for name in dict.fromkeys(owners) if name not in requests]

    def bookkeeping(self) -> dict[str, Any]:
        """What must be the same before a request came and after it was turned away."""
        free = self._pool.free_block_queue.get_all_free_blocks()
        return {
            "requests": sorted(self.scheduler.requests),
            "waiting": len(self.scheduler.waiting),
            "deferred": len(self.scheduler.deferred_waiting),
            "eviction order": [block.block_id for block in free],
            "references": self.references(),
            "cached blocks": [block.block_id for block in self._pool.blocks if block.block_hash is not None],
        }
