"""How many requests are under way at once, and how many may wait for that."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from schedloom.router.failures import busy


class Gate:
    """At most ``limit`` inside and ``waiting`` in line, each for at most ``patience`` seconds, in order of arrival.

    Entering raises Failure (503, with Retry-After) at once when the line is full, or when patience ends.
    """

    def __init__(self, limit: int, waiting: int, patience: float) -> None:
        self.inside = 0
        self._coming = 0
        self._limit = limit
        self._longest_line = waiting
        self._patience = patience
        self._line: OrderedDict[asyncio.Future[None], None] = OrderedDict()

    @property
    def waiting(self) -> int:
        return len(self._line)

    def room(self) -> int:
        """How many may come, those included who come already."""
        return self._limit + self._longest_line - self.inside - len(self._line)

    def may_come(self) -> bool:
        """Whether there is room for another. While there is a line, those who may come count until the loop has come
        round and they have entered.
        """
        crowd = self.inside + len(self._line)
        if crowd < self._limit:
            return True
        if crowd + self._coming >= self._limit + self._longest_line:
            return False
        self._coming += 1
        asyncio.get_running_loop().call_soon(self._came)
        return True

    def _came(self) -> None:
        self._coming -= 1

    def enter(self) -> bool:
        """Returns whether there was room; otherwise ``wait`` is to be awaited. Whoever is inside must ``leave``."""
        if self.inside < self._limit:
            self.inside += 1
            return True
        if len(self._line) >= self._longest_line:
            raise busy()
        return False

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        place = loop.create_future()
        self._line[place] = None
        timer = loop.call_later(self._patience, _give_up, place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.leave()
            raise
        finally:
            timer.cancel()
            self._line.pop(place, None)

    def leave(self) -> None:
        """Whoever leaves hands the place to the first in line that still waits."""
        while self._line:
            place, _ = self._line.popitem(last=False)
            if not place.done():
                place.set_result(None)
                return
        self.inside -= 1


def _give_up(place: asyncio.Future[None]) -> None:
    if not place.done():
        place.set_exception(busy())
