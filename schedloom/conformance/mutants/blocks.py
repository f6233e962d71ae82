"""Faults in keeping KV blocks."""

from __future__ import annotations

from hashlib import sha256
from typing import Any


class LeaksTailBlock:
    """The last block of a finished request is never returned."""

    def _free_request_blocks(self: Any, request: Any) -> None:
        blocks = self.kv_cache_manager.pop_blocks_for_free(request)
        self.kv_cache_manager.block_pool.free_blocks(reversed(blocks[:-1]))


class ClearsTableWithoutFreeing:
    """A preempted request's block table is emptied, its blocks stay counted."""

    def _preempt_request(self: Any, request: Any, *arguments: Any, **keywords: Any) -> None:
        self.kv_cache_manager.pop_blocks_for_free(request)
        super()._preempt_request(request, *arguments, **keywords)  # type: ignore[misc]


class SkipsReferenceOfSharedBlock:
    """A block that is already in use gets another user, and does not count it."""

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        pool = self.kv_cache_manager.block_pool
        touch = pool.touch

        def forgetful(blocks: Any) -> None:
            shared = [block for block in blocks if block.ref_cnt]
            touch(blocks)
            for block in shared:
                block.ref_cnt -= 1

        pool.touch = forgetful


class KeepsPartialAllocation:
    """A request that was turned away leaves a block behind."""

    def _handle_blocked_waiting_request(self: Any, request: Any) -> bool:
        ready: bool = super()._handle_blocked_waiting_request(request)  # type: ignore[misc]
        if not ready and request.request_id in self.turned_away:
            self.kv_cache_manager.block_pool.get_new_blocks(1)
        return ready


class DisturbsEvictionOrder:
    """Looking a request up moves the free blocks around, rejected or not."""

    def _handle_blocked_waiting_request(self: Any, request: Any) -> bool:
        pool = self.kv_cache_manager.block_pool
        pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks() // 2))
        return super()._handle_blocked_waiting_request(request)  # type: ignore[misc, no-any-return]


class HashIgnoresParent:
    """A block's identity is its own tokens, whatever stands before them."""

    def add_request(self: Any, request: Any) -> None:
        size = self.block_size

        def hashes(request: Any) -> list[bytes]:
            tokens = request.all_token_ids
            known, full = len(request.block_hashes), len(tokens) // size
            blocks = [list(tokens[place * size : (place + 1) * size]) for place in range(known, full)]
            return [sha256(repr(block).encode()).digest() for block in blocks]

        request.block_hashes.clear()
        request._block_hasher = hashes
        request.block_hashes.extend(hashes(request))
        super().add_request(request)  # type: ignore[misc]


class HashIgnoresSalt:
    """Tenants share KV."""

    def add_request(self: Any, request: Any) -> None:
        request.cache_salt = None
        request.block_hashes.clear()
        request.block_hashes.extend(request._block_hasher(request))
        super().add_request(request)  # type: ignore[misc]


class FreesWhileStepsWrite:
    """Blocks of an ended request go back at once, although a step in flight still writes to them."""

    def _request_blocks_can_be_freed(self: Any, request: Any) -> bool:
        return True


class FreesBlocksUnderTransfer:
    """A request that is aborted while its KV arrives gives its blocks back at once."""

    def _free_request(self: Any, request: Any, delay_free_blocks: bool = False) -> Any:
        return super()._free_request(request, delay_free_blocks=False)  # type: ignore[misc]


class FreesBeforeHandOff:
    """A Prefiller gives its blocks back when it is done, not when they were pulled."""

    def _connector_finished(self: Any, request: Any) -> Any:
        _, parameters = super()._connector_finished(request)  # type: ignore[misc]
        return False, parameters


class HoldsAbortedLoad:
    """Blocks of a request that was aborted while its KV arrived are never returned."""

    def _update_from_kv_xfer_finished(self: Any, output: Any) -> None:
        loads = output.finished_recving or ()
        output.finished_recving = {name for name in loads if not self.requests[name].is_finished()}
        super()._update_from_kv_xfer_finished(output)  # type: ignore[misc]


class StrandsHandOff:
    """A Prefiller never hears that its blocks were pulled, or that nobody will."""

    def _update_from_kv_xfer_finished(self: Any, output: Any) -> None:
        output.finished_sending = set()
        super()._update_from_kv_xfer_finished(output)  # type: ignore[misc]


class BelievesKvArrived:
    """A request whose KV is on its way is scheduled as if it were there."""

    def _handle_blocked_waiting_request(self: Any, request: Any) -> bool:
        if request.status.name == "WAITING_FOR_REMOTE_KVS":
            self.finished_recving_kv_req_ids.add(request.request_id)
        return super()._handle_blocked_waiting_request(request)  # type: ignore[misc, no-any-return]


class HashIgnoresAdapter:
    """Requests of different adapters share KV."""

    def add_request(self: Any, request: Any) -> None:
        adapter, request.lora_request = request.lora_request, None
        request.block_hashes.clear()
        request.block_hashes.extend(request._block_hasher(request))
        request._block_hasher = without_adapter(request._block_hasher)
        request.lora_request = adapter
        super().add_request(request)  # type: ignore[misc]


def without_adapter(hasher: Any) -> Any:
    def hashes(request: Any) -> Any:
        adapter, request.lora_request = request.lora_request, None
        try:
            return hasher(request)
        finally:
            request.lora_request = adapter

    return hashes


class SlidesTooFar:
    """A window's oldest block is given back while the window still reaches into it."""

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            skipped, size = manager.get_num_skipped_tokens, manager.block_size
            manager.get_num_skipped_tokens = lambda tokens, skipped=skipped, size=size: skipped(tokens) + size


class HasNoRoomForDrafts:
    """A drafter that looks ahead gets no blocks for what it writes there."""

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.num_lookahead_tokens = 0


class CachesWhatIsNeverComputed:
    """A request that is preempted in the step that gave it tokens leaves their blocks in the prefix cache."""

    def _forget_uncomputed(self: Any, request: Any) -> None:
        pass
