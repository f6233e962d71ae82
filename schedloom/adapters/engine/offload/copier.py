"""Copies KV blocks between a worker's cache and its host memory, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from schedloom.adapters.engine.offload.host_memory import HostMemory
from schedloom.adapters.engine.offload.metadata import BlockCopies

STAGING_BYTES = 32 << 20
"""Blocks are gathered on the device in batches of about this size: few large copies instead of many small ones."""


class BlockCopier:
    """``groups`` holds, for each KV cache group, its caches by block: see ``caches_by_block``."""

    def __init__(self, groups: Sequence[Sequence[Any]], num_slots: int) -> None:
        self._groups = groups
        self._device = next(cache.device for caches in groups for cache in caches)
        slot_bytes = max(sum(_bytes_of_block(cache) for cache in caches) for caches in groups)
        self.host = HostMemory(num_slots, slot_bytes, pinned=self._device.type != "cpu")
        self._batch = max(1, STAGING_BYTES // slot_bytes)
        self._staging: Any = None

    @property
    def device(self) -> Any:
        return self._device

    def save(self, copies: BlockCopies) -> None:
        for blocks, slots in self._batches(copies):
            rows, numbers = self._rows(len(blocks)), self._numbers(blocks)
            for cache, part in self._parts(copies.group, rows):
                part.copy_(cache.index_select(0, numbers).flatten(1))
            self.host.write(slots, rows)

    def load(self, copies: BlockCopies) -> None:
        for blocks, slots in self._batches(copies):
            rows, numbers = self._rows(len(blocks)), self._numbers(blocks)
            self.host.read(slots, rows)
            for cache, part in self._parts(copies.group, rows):
                cache.index_copy_(0, numbers, part.reshape(len(blocks), *cache.shape[1:]))

    def _batches(self, copies: BlockCopies) -> Iterator[tuple[list[int], list[int]]]:
        for start in range(0, len(copies.blocks), self._batch):
            end = start + self._batch
            yield copies.blocks[start:end], copies.slots[start:end]

    def _rows(self, count: int) -> Any:
        if self._staging is None:
            shape = (self._batch, self.host.slot_bytes)
            self._staging = torch.empty(shape, dtype=torch.uint8, device=self._device)
        return self._staging[:count]

    def _numbers(self, blocks: list[int]) -> Any:
        return torch.tensor(blocks, device=self._device)

    def _parts(self, group: int, rows: Any) -> Iterator[tuple[Any, Any]]:
        """Each cache of ``group`` with the columns of ``rows`` that are its own."""
        start = 0
        for cache in self._groups[group]:
            end = start + _bytes_of_block(cache)
            yield cache, rows[:, start:end]
            start = end


def caches_by_block(caches: Mapping[str, Any], layers: Sequence[str], num_blocks: int) -> list[Any]:
    """The caches of ``layers`` as bytes whose first dimension is the scheduler's block, each memory once."""
    found: dict[tuple[Any, ...], Any] = {}
    for name in layers:
        cache = caches.get(name, ())
        for tensor in (cache,) if isinstance(cache, torch.Tensor) else cache:
            found.setdefault((tensor.data_ptr(), *tensor.stride()), _by_block(name, tensor, num_blocks))
    return list(found.values())


def _by_block(name: str, cache: Any, num_blocks: int) -> Any:
    """An attention kernel may divide each of the scheduler's blocks into several of its own."""
    if cache.shape[0] % num_blocks:
        raise ValueError(f"the KV cache of {name} has {cache.shape[0]} blocks where {num_blocks} or a multiple is due")
    return cache.view(torch.uint8).unflatten(0, (num_blocks, -1))


def _bytes_of_block(cache: Any) -> int:
    return int(cache[0].numel())
