"""The host memory of one worker: one row of bytes for each slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

CHUNK_BYTES = 64 << 20
"""Memory is allocated, and pinned where an accelerator copies into it, in pieces of about this size."""


class HostMemory:
    """Grows with the highest slot that was used, and never shrinks: pinning is slow."""

    def __init__(self, num_slots: int, slot_bytes: int, pinned: bool) -> None:
        self.slot_bytes = slot_bytes
        self._pinned = pinned
        self._chunk_slots = max(1, min(num_slots, CHUNK_BYTES // slot_bytes))
        self._chunks: dict[int, Any] = {}

    @property
    def allocated_bytes(self) -> int:
        return len(self._chunks) * self._chunk_slots * self.slot_bytes

    def write(self, slots: Sequence[int], rows: Any) -> None:
        for place, target in self._runs(slots):
            target.copy_(rows[place : place + len(target)], non_blocking=True)

    def read(self, slots: Sequence[int], rows: Any) -> None:
        for place, source in self._runs(slots):
            rows[place : place + len(source)].copy_(source, non_blocking=True)

    def _runs(self, slots: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Neighbouring slots are copied together: where each run stands in ``slots``, and its memory."""
        start = 0
        for end in range(1, len(slots) + 1):
            if end == len(slots) or slots[end] != slots[end - 1] + 1 or slots[end] % self._chunk_slots == 0:
                chunk, offset = divmod(slots[start], self._chunk_slots)
                yield start, self._chunk(chunk)[offset : offset + end - start]
                start = end

    def _chunk(self, number: int) -> Any:
        if number not in self._chunks:
            shape = (self._chunk_slots, self.slot_bytes)
            self._chunks[number] = torch.empty(shape, dtype=torch.uint8, pin_memory=self._pinned)
        return self._chunks[number]
