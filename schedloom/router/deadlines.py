"""Many things that are each to be done within the same time, by one timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadlines:
    """Calls every callback that was added and not taken back, ``seconds`` after it was added.

    What is added first is due first, so that neither adding nor taking back touches the event loop's own timers.
    """

    __slots__ = ("_due", "_seconds", "_timer")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due: dict[Callable[[], None], float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, callback: Callable[[], None]) -> None:
        """Whose time begins anew if it was there."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._seconds
        self._due.pop(callback, None)
        self._due[callback] = due
        if self._timer is None:
            self._timer = loop.call_at(due, self._ring)

    def take_back(self, callback: Callable[[], None]) -> None:
        self._due.pop(callback, None)

    def _ring(self) -> None:
        loop = asyncio.get_running_loop()
        now, self._timer = loop.time(), None
        for callback, due in tuple(self._due.items()):
            if due > now:
                self._timer = self._timer or loop.call_at(due, self._ring)
                return
            if self._due.pop(callback, None) is not None:
                callback()
