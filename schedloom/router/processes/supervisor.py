"""Keeps the processes of a router running: starts them, replaces those that die, and ends them together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import orjson
import uvloop

from schedloom.core.errors import ConfigurationError
from schedloom.router.fleet.roster import Roster
from schedloom.router.logs import whole
from schedloom.router.processes.assignment import SIZE_BYTES, Assignment, figures_in, for_each
from schedloom.router.reload import Again, Reloading
from schedloom.router.serve import address_of, announce, bind, listen
from schedloom.router.sessions.table import SharedSessions
from schedloom.router.settings import RouterSettings
from schedloom.router.tasks import within
from schedloom.router.telemetry.shared_figures import bury

log = logging.getLogger(__name__)

FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 30.0
STEADY_SECONDS: Final = 60.0
"""Who served for so long did not die of its start: the next pause is the first one again."""

_CHILD: Final = (
    "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    "from schedloom.router.processes.child import main; main()"
)
"""A terminal sends SIGHUP to all; the supervisor is the one to hear it, and no child from its first instruction on."""

_MARGIN_SECONDS: Final = 5.0


def supervise(settings: RouterSettings, again: Again) -> None:
    """Serve by ``settings.processes`` processes until SIGTERM or SIGINT; SIGHUP has the engines read ``again``.

    Raises ConfigurationError when the router cannot start as configured.
    """
    listen(settings.host, settings.port).close()
    with tempfile.TemporaryDirectory(prefix="schedloom-") as room, _address(settings) as (port, address):
        figures_in(Path(room)).mkdir()
        roster = Roster(settings.workers)
        level = logging.getLogger().level
        assignment = Assignment(for_each(settings, port), roster.engines, Path(room), 0, level)
        supervisor = _Supervisor(assignment, roster, address)
        uvloop.run(supervisor.run(Reloading(settings, again, roster, supervisor.use)))


@contextlib.contextmanager
def _address(settings: RouterSettings) -> Iterator[tuple[int, str]]:
    """The port, kept for the children by a socket that does not listen."""
    with bind(settings.host, settings.port, shared=True) as placeholder:
        yield placeholder.getsockname()[1], address_of(settings.host, placeholder)


class _Supervisor:
    def __init__(self, assignment: Assignment, roster: Roster, address: str) -> None:
        self._assignment = assignment
        self._roster = roster
        self._address = address
        self._settings = assignment.settings
        self._stopping = asyncio.Event()
        self._children: set[Process] = set()

    async def run(self, reloading: Reloading) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._told_to_stop)
        SharedSessions.create(self._assignment.sessions, self._settings.session_capacity)
        async with reloading.on_hangup():
            try:
                await self._serve()
            finally:
                await self._end_all()
        whole.info("the router has ended")

    def use(self) -> None:
        """The engines of the roster, from now on and in all processes."""
        self._assignment = replace(self._assignment, engines=self._roster.engines)
        for child in self._children:
            _tell(child, self._roster.engines)

    async def _serve(self) -> None:
        places = range(self._settings.processes)
        started = await asyncio.gather(*map(self._start, places))
        self._assignment = replace(self._assignment, is_first=False)
        complaints = [sentence for _, sentences in started for sentence in sentences]
        if complaints and not self._stopping.is_set():
            raise ConfigurationError(*dict.fromkeys(complaints))
        if not self._stopping.is_set():
            announce(self._address)
        await asyncio.gather(*(self._keep(child, place) for (child, _), place in zip(started, places, strict=True)))

    async def _keep(self, child: Process, place: int) -> None:
        """Whenever ``child`` dies, start another in its place."""
        pause = FIRST_PAUSE
        while True:
            begun = time.monotonic()
            status = await self._end_of(child)
            bury(self._at(place).figures)
            if self._stopping.is_set():
                return
            pause = FIRST_PAUSE if time.monotonic() - begun > STEADY_SECONDS else pause
            log.error("process %d of the router %s; another starts in %.1f s", child.pid, _fate(status), pause)
            if await self._stops_within(pause):
                return
            pause = min(2 * pause, LONGEST_PAUSE)
            child, complaints = await self._start(place)
            for sentence in complaints:
                log.error("a process of the router cannot start: %s", sentence)

    async def _start(self, place: int) -> tuple[Process, list[str]]:
        """A child that serves, or one that is about to end and has said why. What a hangup ends before the first
        instruction of it is begun anew.
        """
        child, said = await self._begin(place)
        while not said and await child.wait() == -signal.SIGHUP and not self._stopping.is_set():
            self._children.discard(child)
            child, said = await self._begin(place)
        if self._stopping.is_set():
            _signal(child, signal.SIGTERM)
        unsaid = ["a process of the router ended before it served; its log says why"]
        return child, orjson.loads(said) if said else unsaid

    async def _begin(self, place: int) -> tuple[Process, bytes]:
        """A child, and what it said first."""
        child = await asyncio.create_subprocess_exec(*(sys.executable, "-c", _CHILD), stdin=PIPE, stdout=PIPE)
        self._children.add(child)
        assert child.stdout is not None
        _tell(child, self._at(place))
        return child, await child.stdout.readline()

    def _at(self, place: int) -> Assignment:
        return replace(self._assignment, place=place)

    async def _end_of(self, child: Process) -> int:
        status = await child.wait()
        self._children.discard(child)
        return status

    async def _stops_within(self, seconds: float) -> bool:
        with contextlib.suppress(asyncio.TimeoutError):
            await within(seconds, self._stopping.wait())
        return self._stopping.is_set()

    def _told_to_stop(self) -> None:
        if not self._stopping.is_set():
            whole.info("the router ends, within %g s", self._settings.shutdown_grace_seconds)
        self._stop()

    def _stop(self) -> None:
        self._stopping.set()
        for child in self._children:
            _signal(child, signal.SIGTERM)

    async def _end_all(self) -> None:
        self._stop()
        ends: Any = [asyncio.create_task(child.wait()) for child in self._children]
        if ends:
            await asyncio.wait(ends, timeout=self._settings.shutdown_grace_seconds + _MARGIN_SECONDS)
        for child in self._children:
            _signal(child, signal.SIGKILL)
        await asyncio.gather(*ends)


def _tell(child: Process, what: object) -> None:
    """Whoever has ended does not hear it."""
    assert child.stdin is not None
    told = pickle.dumps(what)
    with contextlib.suppress(OSError):
        child.stdin.write(len(told).to_bytes(SIZE_BYTES, "big") + told)


def _fate(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


def _signal(child: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)
