"""How many requests begin in one round of the event loop, and what becomes of those that come faster."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

_BEGIN: Final = 32
_REFUSE: Final = 4


class Arrival(Protocol):
    """A connection on which a request has come."""

    def begin(self) -> None:
        """Read the request, and have it answered."""
        ...

    def turn_away(self) -> None:
        """Read the request, and refuse it."""
        ...


class Arrivals:
    """Begins at most so many requests in a round of the event loop, and holds the others unread.

    A thousand requests begun together take half as long again, each, as a few dozen after the other: nothing of one
    is left in the processor's caches when its turn comes again. What is held costs next to nothing.

    While all that are held have ``room``, the oldest is served first. Beyond that the newest is, and the oldest is
    refused, as its client is the likeliest to have given up: but only so many in a round that serving keeps most of
    the time.
    """

    def __init__(self, room: Callable[[], int] = lambda: sys.maxsize) -> None:
        self._room = room
        self._begun = 0
        self._held: OrderedDict[Arrival, None] = OrderedDict()

    def __len__(self) -> int:
        """How many are held."""
        return len(self._held)

    def may_begin(self) -> bool:
        """Whether another may begin in this round, of which it then is one."""
        if self._held or self._begun >= _BEGIN:
            return False
        self._begun += 1
        if self._begun == 1:
            self._loop.call_soon(self._come_round)
        return True

    def hold(self, arrival: Arrival) -> None:
        """Until its turn."""
        self._held[arrival] = None

    def forget(self, arrival: Arrival) -> None:
        """Its client has left."""
        self._held.pop(arrival, None)

    def empty(self) -> None:
        """Begin all that are held."""
        while self._held:
            self._held.popitem()[0].begin()

    def _come_round(self) -> None:
        held, room = self._held, self._room()
        self._begun = min(len(held), _BEGIN)
        if not held:
            return
        self._loop.call_soon(self._come_round)
        for _ in range(min(len(held) - room, _REFUSE)):
            held.popitem(last=False)[0].turn_away()
        for _ in range(min(len(held), _BEGIN)):
            held.popitem(last=len(held) > room)[0].begin()

    @functools.cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()  # before Python 3.12 each such call asks for the process id
