"""A fleet that changes while it serves: who is new, who drains, and who is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from schedloom.router.fleet.breaker import Clock
from schedloom.router.fleet.checks import doubt
from schedloom.router.fleet.fleet import Fleet
from schedloom.router.fleet.membership import Membership
from schedloom.router.fleet.roster import Roster
from schedloom.router.fleet.worker import Health, Worker
from schedloom.router.http.upstream import Upstream
from schedloom.router.logs import common
from schedloom.router.settings import RouterSettings
from schedloom.router.tasks import stopped
from schedloom.router.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.25


class Changes:
    """Makes ``fleet`` what ``roster`` says.

    Whoever the roster does not name any more drains, and is forgotten when no request ``needs`` it.
    """

    def __init__(
        self,
        fleet: Fleet,
        roster: Roster,
        membership: Membership,
        upstream: Upstream,
        needs: Callable[[Worker], bool],
        metrics: Metrics,
        settings: RouterSettings,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._fleet = fleet
        self._roster = roster
        self._membership = membership
        self._upstream = upstream
        self._needs = needs
        self._metrics = metrics
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._welcomes: dict[Worker, asyncio.Task[None]] = {}
        self._lives: dict[str, int] = {}
        self._seeing_off: asyncio.Task[None] | None = None
        fleet.on_draining = self._see_off_soon

    def apply(self) -> None:
        """To be called when the roster has changed."""
        known = self._fleet.workers
        for worker in known:
            self._mark(worker)
        for name in self._roster.engines.keys() - {worker.name for worker in known}:
            self._welcome(name)
        if lacking := self._fleet.lacking:
            common.warning("no %s is left: %s", " and no ".join(lacking), _consequence(lacking))
        self._see_off_soon()

    async def close(self) -> None:
        await stopped(*self._welcomes.values(), self._seeing_off)

    def _mark(self, worker: Worker) -> None:
        engine = self._roster.engines.get(worker.name)
        if engine is not None and not engine.drain:
            self._keep(worker)
        elif not worker.drains:
            common.info("%s drains%s", worker.name, "" if engine else ", and is forgotten then")
            worker.drain()

    def _keep(self, worker: Worker) -> None:
        if worker.drains:
            common.info("%s does not drain any more", worker.name)
            worker.stay()
            self._membership.look_soon(worker)

    def _welcome(self, name: str) -> None:
        worker = Worker(name, self._roster.engines[name], self._clock)
        worker.lives = self._lives.get(name, 0)
        common.info("%s is new, at %s", name, worker.origin)
        self._fleet.add(worker)
        task = self._welcomes[worker] = asyncio.get_running_loop().create_task(self._get_to_know(worker))
        task.add_done_callback(lambda _: self._welcomes.pop(worker, None))

    async def _get_to_know(self, worker: Worker) -> None:
        await self._membership.look_soon(worker)
        if worker.health is Health.DOWN:
            common.warning("%s is not there yet: %s", worker.name, worker.trouble)
        elif worker.known and (doubted := doubt((worker, worker.contract), self._settings)):
            common.warning(doubted)

    def _see_off_soon(self) -> None:
        if self._seeing_off is None and self._leaving:
            self._seeing_off = asyncio.get_running_loop().create_task(self._see_off())

    @property
    def _leaving(self) -> list[Worker]:
        return [one for one in self._fleet.workers if self._leaves(one)]

    def _leaves(self, worker: Worker) -> bool:
        return worker.health is Health.DRAINING or worker.name not in self._roster.engines

    async def _see_off(self) -> None:
        while leaving := self._leaving:
            for worker in leaving:
                if self._leaves(worker) and not self._needs(worker):
                    await self._let_go(worker)
            await self._sleep(LOOK_SECONDS)
        self._seeing_off = None

    async def _let_go(self, worker: Worker) -> None:
        if worker.name in self._roster.engines:
            log.info("%s has drained", worker.name)
            worker.drained()
        else:
            log.info("%s is gone", worker.name)
            await self._forget(worker)

    async def _forget(self, worker: Worker) -> None:
        self._fleet.forget(worker)
        if worker.settings.name is not None:  # it may come back under its name, and nobody saw what it did meanwhile
            self._lives[worker.name] = worker.lives + 1
        await stopped(self._welcomes.get(worker))
        await self._membership.forget(worker)
        self._metrics.forget(worker.name)
        if all(one.origin != worker.origin for one in self._fleet.workers):
            self._upstream.forget(worker.origin)


def _consequence(lacking: Sequence[str]) -> str:
    if "Decoder" in lacking:
        return "every request is answered 503 until one joins"
    return "what Decoders do alone is served, and requests that need both are answered 503 until one joins"
