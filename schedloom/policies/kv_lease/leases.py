"""The book of leases."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count

from schedloom.core.views import Blocks


@dataclass(slots=True, eq=False)
class Lease:
    """One session's blocks, preferred until ``expires``."""

    blocks: Blocks
    expires: float


class Leases:
    """Leases by session, the oldest first, and which of them is to be refreshed next.

    A lease is due at a count of blocks taken. All leases last equally long, so the oldest expires first.
    """

    def __init__(self) -> None:
        self._by_session: dict[str, Lease] = {}
        self._sizes: dict[str, int] = {}
        self._due: list[tuple[int, int, str, Lease]] = []
        self._serial = count()
        self.num_blocks = 0

    def __bool__(self) -> bool:
        return bool(self._by_session)

    @property
    def next_due(self) -> int:
        return self._due[0][0] if self._due else 0

    def start(self, session: str, lease: Lease, due: int) -> None:
        """Enter ``lease``, new or refreshed; a refreshed one keeps its place."""
        size = len(lease.blocks)
        self.num_blocks += size - self._sizes.get(session, 0)
        self._by_session[session] = lease
        self._sizes[session] = size
        heapq.heappush(self._due, (due, next(self._serial), session, lease))

    def end(self, session: str) -> None:
        if self._by_session.pop(session, None) is not None:
            self.num_blocks -= self._sizes.pop(session)

    def shrink(self, most: int, now: float) -> None:
        """End what has expired, and the oldest leases until no more than ``most`` blocks are on lease."""
        while self._by_session:
            session, oldest = next(iter(self._by_session.items()))
            if oldest.expires > now and self.num_blocks <= most:
                return
            self.end(session)

    def take_due(self, taken: int) -> list[tuple[str, Lease]]:
        """Every lease that is due, to be started again or ended."""
        due = []
        while self._due and self._due[0][0] <= taken:
            _, _, session, lease = heapq.heappop(self._due)
            if self._by_session.get(session) is lease:
                due.append((session, lease))
        return due
