"""vLLM's pool of KV blocks, as policies see it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any


class HashedBlocks:
    """Blocks with the hashes that they had: a block with another hash, or none, was reused since."""

    __slots__ = ("entries",)

    def __init__(self, entries: list[tuple[Any, Any]]) -> None:
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)

    def forget_reused(self) -> None:
        self.entries = [(block, known) for block, known in self.entries if block.block_hash == known]


class VllmPoolView:
    """The ``BlockPool`` of a ``KVCacheManager``. Two of its methods are counted from now on; nothing is changed."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._pool = manager.block_pool
        self._touch = self._pool.touch
        self.num_taken = 0
        self._pool.get_new_blocks = self._counted(self._pool.get_new_blocks, int)
        self._pool.touch = self._counted(self._pool.touch, len)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_gpu_blocks  # type: ignore[no-any-return]

    @property
    def num_free(self) -> int:
        return self._pool.get_num_free_blocks()  # type: ignore[no-any-return]

    def blocks_of(self, request: Any) -> HashedBlocks:
        groups = self._manager.get_blocks(request.request_id).blocks
        hashed = (block for block in chain.from_iterable(groups) if block.block_hash is not None)
        return HashedBlocks([(block, block.block_hash) for block in hashed if self._is_mine(block)])

    def refresh(self, blocks: HashedBlocks) -> int:
        blocks.forget_reused()
        free = [block for block, _ in blocks.entries if not block.ref_cnt]
        self._touch(free)
        # The end of a prefix is worth nothing without its beginning: like vLLM, let it be evicted first.
        self._pool.free_blocks(reversed(free))
        return len(blocks)

    def _is_mine(self, block: Any) -> bool:
        return getattr(block, "pool", None) in (None, self._pool)

    def _counted(self, method: Callable[[Any], Any], size: Callable[[Any], int]) -> Callable[[Any], Any]:
        def counted(argument: Any) -> Any:
            self.num_taken += size(argument)
            return method(argument)

        return counted
