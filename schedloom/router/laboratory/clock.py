"""A loop on which waiting takes no time, so that timeouts cost nothing."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Outcome = TypeVar("Outcome")


class _InstantSelector(selectors.DefaultSelector):
    """Waiting moves the clock."""

    loop: SimulatedLoop

    def select(self, timeout: float | None = None) -> Any:
        if timeout:
            self.loop.now += timeout
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    now = 0.0

    def __init__(self) -> None:
        selector = _InstantSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def simulate(main: Coroutine[Any, Any, Outcome]) -> Outcome:
    loop = SimulatedLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()
