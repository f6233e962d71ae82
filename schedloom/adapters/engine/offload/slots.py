"""Who owns which part of the host memory. The scheduler alone keeps these books; the workers follow."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class HostSlots:
    """Slots for one block each. The lowest free ones are taken first, so that memory is touched only when needed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """``count`` slots, or None when there are not so many."""
        if count > len(self._free):
            return None
        return [heapq.heappop(self._free) for _ in range(count)]

    def give_back(self, slots: Iterable[int]) -> None:
        for slot in slots:
            heapq.heappush(self._free, slot)
