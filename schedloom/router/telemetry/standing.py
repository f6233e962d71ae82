"""How things stand at the moment: the engines, what is under way on them, and the line before them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from schedloom.router.fleet.fleet import Fleet
from schedloom.router.fleet.worker import Health
from schedloom.router.tasks import stopped
from schedloom.router.telemetry.metrics import Metrics

PUBLISHED_EVERY_SECONDS: Final = 1.0


class Standing:
    """Read when figures are asked for; of several processes, only the one that is asked can do that, so that each
    publishes its own again and again.
    """

    def __init__(self, fleet: Fleet, waiting: Callable[[], int], metrics: Metrics) -> None:
        self._fleet = fleet
        self._waiting = waiting
        self._metrics = metrics
        self._publishing: asyncio.Task[None] | None = None
        metrics.on_asked = self.publish

    def start(self) -> None:
        if self._metrics.are_shared:
            self._publishing = asyncio.create_task(self._keep_publishing())

    async def close(self) -> None:
        if self._publishing is not None:
            await stopped(self._publishing)
            self._metrics.share()

    async def _keep_publishing(self) -> None:
        while True:
            self.publish()
            self._metrics.share()
            await asyncio.sleep(PUBLISHED_EVERY_SECONDS)

    def publish(self) -> None:
        self._metrics.load.set(self._metrics.in_flight)
        self._metrics.waiting.set(self._waiting())
        engines = self._fleet.workers
        self._metrics.engine_state.tell(
            {(one.name, state.value): one.health is state for one in engines for state in Health}
        )
        self._metrics.engine_in_flight.tell(
            {(one.name, str(rank)): busy for one in engines for rank, busy in enumerate(one.busy)}
        )
