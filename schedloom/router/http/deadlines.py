"""Many things that are each to be done within the same time, by one timer."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable


class Deadlines:
    """Calls every callback that was added and not taken back, ``seconds`` after it was added.

    What is added first is due first, so that neither adding nor taking back touches the event loop's own timers.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due: dict[Callable[[], None], float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, callback: Callable[[], None]) -> None:
        """Which must not be there."""
        due = self._loop.time() + self._seconds
        self._due[callback] = due
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._ring)

    def take_back(self, callback: Callable[[], None]) -> None:
        self._due.pop(callback, None)

    @functools.cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()  # before Python 3.12 each such call asks for the process id

    def _ring(self) -> None:
        loop = self._loop
        now, self._timer = loop.time(), None
        for callback, due in tuple(self._due.items()):
            if due > now:
                self._timer = self._timer or loop.call_at(due, self._ring)
                return
            if self._due.pop(callback, None) is not None:
                callback()
