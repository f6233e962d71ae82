"""SIGHUP, which ends no router, from its first moment to its last.

It imports next to nothing, so that this moment comes soon.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Hangups:
    """Those that come while nobody hears them are told to the first who does, as one."""

    def __init__(self) -> None:
        self._hearer: Callable[[], object] = self._remember
        self._came = False

    def heed(self) -> None:
        """From now on a hangup ends this process no more."""
        signal.signal(signal.SIGHUP, lambda *_: self._hearer())

    @contextmanager
    def heard_by(self, hearer: Callable[[], object]) -> Iterator[None]:
        """``hearer`` is called between any two instructions. The process is about to end afterwards, and hears none."""
        self.heed()
        self._hearer = hearer
        if self._came:
            hearer()
        try:
            yield
        finally:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _remember(self) -> None:
        self._came = True


hangups = Hangups()
"""This process's."""
