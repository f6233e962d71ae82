"""What the laboratory sees of a scheduler beside its outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from schedloom.adapters.engine.parts.recovery import preemption_stores
from schedloom.adapters.engine.pool import VllmPoolView


@dataclass(slots=True)
class Preemption:
    """``freed`` counts the blocks that were free after it and not before; ``deferred`` tells that others became free
    only after a step in flight; ``reset`` tells that the cache was reset, ``alone`` that no other request held KV;
    ``uncomputed`` counts the blocks in the prefix cache that it was to compute."""

    request_id: str
    freed: int
    deferred: bool
    reset: bool
    alone: bool
    uncomputed: int


class Probe:
    """Stands first in a scheduler's bases and writes down what happens inside its steps."""

    preemptions: list[Preemption]
    counted: list[str]
    resetting: bool
    loading: list[str]
    saved: list[tuple[str, int]]
    refreshed: list[int]

    def watch(self) -> None:
        self.preemptions, self.counted, self.resetting = [], [], False
        self.loading, self.saved, self.refreshed = [], [], []
        self._watch_loads()
        self._watch_stores()
        self._watch_pool()
        manager = self.kv_cache_manager  # type: ignore[attr-defined]
        record = manager.record_prefix_cache_stats

        def recording(request: Any, *arguments: Any, **keywords: Any) -> None:
            self.counted.append(request.request_id)
            record(request, *arguments, **keywords)

        manager.record_prefix_cache_stats = recording

    def _watch_loads(self) -> None:
        connector = self.connector  # type: ignore[attr-defined]
        if connector is None:
            return
        tell = connector.update_state_after_alloc

        def telling(request: Any, blocks: Any, num_external_tokens: int) -> None:
            self.loading += [request.request_id] if num_external_tokens else []
            tell(request, blocks, num_external_tokens)

        connector.update_state_after_alloc = telling

    def _watch_stores(self) -> None:
        for store in preemption_stores(self.connector):  # type: ignore[attr-defined]
            take = store.update_state_before_preempt

            def taking(request: Any, blocks: Any, tokens: int, take: Any = take) -> Any:
                taken = take(request, blocks, tokens)
                self.saved += [(request.request_id, request.num_computed_tokens)] if taken else []
                return taken

            store.update_state_before_preempt = taking

    def _watch_pool(self) -> None:
        if not hasattr(self, "view"):
            return
        watched = self

        class WatchedPool(VllmPoolView):
            def refresh(self, blocks: Any) -> int:
                kept = super().refresh(blocks)
                watched.refreshed += [block.block_id for block, _ in blocks.entries if not block.ref_cnt]
                return kept

        self.view._pool = WatchedPool(self.kv_cache_manager)  # type: ignore[attr-defined]

    def _preempt_request(self, request: Any, *arguments: Any, **keywords: Any) -> Any:
        pool = self.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        before, deferred = pool.get_num_free_blocks(), len(self.deferred_frees)  # type: ignore[attr-defined]
        alone = not (self.running or self.kv_holding_waiting)  # type: ignore[attr-defined]
        to_compute = self._blocks_to_compute(request)
        result = super()._preempt_request(request, *arguments, **keywords)  # type: ignore[misc]
        freed = pool.get_num_free_blocks() - before
        fenced = len(self.deferred_frees) > deferred  # type: ignore[attr-defined]
        uncomputed = sum(block.block_hash is not None for block in to_compute)
        self.preemptions.append(Preemption(request.request_id, freed, fenced, self.resetting, alone, uncomputed))
        return result

    def _blocks_to_compute(self, request: Any) -> list[Any]:
        manager = self.kv_cache_manager  # type: ignore[attr-defined]
        sizes = [group.kv_cache_spec.block_size for group in manager.kv_cache_config.kv_cache_groups]
        pairs = zip(manager.get_blocks(request.request_id).blocks, sizes, strict=True)
        return [block for table, size in pairs for block in table[request.num_computed_tokens // size :]]

    def reset_prefix_cache(self, *arguments: Any, **keywords: Any) -> Any:
        self.resetting = True
        try:
            return super().reset_prefix_cache(*arguments, **keywords)  # type: ignore[misc]
        finally:
            self.resetting = False
