"""A4, X8: SIGHUP ends no router, from the first moment of its code to the last, and is not lost."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import pty
import re
import signal
import sys
import termios
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from schedloom.router.fleet.roster import Roster
from schedloom.router.hangup import Hangups
from schedloom.router.processes import supervisor
from schedloom.router.processes.assignment import Assignment
from schedloom.router.reload import Reloading
from schedloom.router.serve import listen
from schedloom.router.settings import router_settings
from tests.router.fakes import FakeEngine, decoder, prefiller
from tests.router.sockets import asgi, served

pytestmark = pytest.mark.anyio

SETTINGS = {"workers": [{"url": "http://p:1", "role": "prefill"}, {"url": "http://d:1", "role": "decode"}]}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def hangups() -> Iterator[Hangups]:
    before = signal.getsignal(signal.SIGHUP)
    hangups = Hangups()
    hangups.heed()
    yield hangups
    signal.signal(signal.SIGHUP, before)


def test_what_came_before_anybody_heard_it_is_told_once_to_the_first_who_does(hangups: Hangups) -> None:
    heard: list[int] = []
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGHUP)
    with hangups.heard_by(lambda: heard.append(1)):
        assert heard == [1]
        os.kill(os.getpid(), signal.SIGHUP)
        assert heard == [1, 1]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("before", [True, False])
async def test_a_hangup_before_the_router_runs_has_the_file_read_again(
    before: bool, monkeypatch: pytest.MonkeyPatch, hangups: Hangups
) -> None:
    monkeypatch.setattr("schedloom.router.reload.hangups", hangups)
    settings, read = router_settings(SETTINGS), asyncio.Event()
    if before:
        os.kill(os.getpid(), signal.SIGHUP)
    async with Reloading(settings, lambda: settings, Roster(settings.workers), read.set).on_hangup():
        if not before:
            await asyncio.sleep(0.05)
            assert not read.is_set()
            os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(read.wait(), 5)


@pytest.mark.parametrize("times", [1, 2])
async def test_a_process_that_a_hangup_ends_before_its_first_instruction_is_begun_anew(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"
    command = (
        f"import os, signal; file = open({str(begun)!r}, 'a+b', 0); file.write(b'.')\n"
        f"signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        f"file.tell() <= {times} and os.kill(os.getpid(), signal.SIGHUP)\nprint('[]', flush=True)"
    )
    monkeypatch.setattr(supervisor, "_CHILD", command)
    settings = router_settings(SETTINGS)
    roster = Roster(settings.workers)
    assignment = Assignment(settings, roster.engines, tmp_path, 0, logging.INFO)
    one = supervisor._Supervisor(assignment, roster, "http://h:1")
    child, complaints = await one._start(0)
    assert (complaints, await child.wait()) == ([], 0)
    assert begun.read_bytes() == b"." * (times + 1) and one._children == {child}


class Starting:
    """A router that starts, by its command."""

    def __init__(self, process: Process, port: int, file: Path, log: Path) -> None:
        self.process = process
        self.port = port
        self.file = file
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def heeds(self) -> bool:
        """Whether hangups do not end it, which it has to see to before it loads anything that takes long."""
        is_late = "pydantic_core" in Path(f"/proc/{self.process.pid}/maps").read_text()
        caught = re.search(r"^SigCgt:\s+(\w+)$", Path(f"/proc/{self.process.pid}/status").read_text(), re.MULTILINE)
        assert caught is not None
        heeds = bool(int(caught[1], 16) & 1 << signal.SIGHUP - 1)
        assert heeds or not is_late
        return heeds

    async def until_it_heeds(self) -> None:
        while not self.heeds:
            assert self.process.returncode is None, self.log
            await asyncio.sleep(0.001)

    async def until_logged(self, text: str) -> None:
        for _ in range(200):
            if text in self.log:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(self.log)

    async def states(self) -> dict[str, str]:
        async with httpx2.AsyncClient(timeout=20) as client:
            with suppress(httpx2.TransportError):
                states: dict[str, str] = (await client.get(f"http://127.0.0.1:{self.port}/ready")).json()["engines"]
                return states
        return {}

    async def until_ready(self, *engines: str) -> None:
        for _ in range(600):
            assert self.process.returncode is None, self.log
            if await self.states() == dict.fromkeys(engines, "ready"):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{await self.states()}: {self.log}")


def free_port() -> int:
    with listen("127.0.0.1", 0) as taken:
        port: int = taken.getsockname()[1]
        return port


def write(file: Path, *engines: FakeEngine) -> None:
    file.write_text(json.dumps({"workers": [{"url": engine.origin} for engine in engines]}))


@asynccontextmanager
async def starting(folder: Path, engines: list[FakeEngine], count: int, **more: Any) -> AsyncIterator[Starting]:
    """In front of the first two of ``engines``; told to end at last, it does so with status 0."""
    file, log, port = folder / "router.yaml", folder / "log", free_port()
    async with AsyncExitStack() as stack:
        for engine in engines:
            engine.origin = await stack.enter_async_context(served(asgi(engine)))
        write(file, *engines[:2])
        command = [sys.executable, "-m", "schedloom", "route", "--config", str(file), "--port", str(port)]
        streams: dict[str, Any] = {"stdout": DEVNULL, "stderr": stack.enter_context(log.open("wb"))} | more
        process = await asyncio.create_subprocess_exec(*command, "--workers", str(count), **streams)
        try:
            yield Starting(process, port, file, log)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 30) == 0, log.read_text()
        finally:
            with suppress(ProcessLookupError):
                process.kill()


@pytest.mark.parametrize("count", [1, 2])
async def test_a_hangup_at_the_first_moment_of_a_start_is_heeded(tmp_path: Path, count: int) -> None:
    engines = [prefiller(), decoder(0), decoder(1)]
    async with starting(tmp_path, engines, count) as router:
        await router.until_it_heeds()
        router.process.send_signal(signal.SIGHUP)
        await router.until_ready("engine-0", "engine-1")
        await router.until_logged("the configuration is the same")
        write(router.file, *engines)
        router.process.send_signal(signal.SIGHUP)
        await router.until_ready("engine-0", "engine-1", "engine-2")


@pytest.mark.parametrize("count", [1, 2])
async def test_hangups_without_a_pause_end_no_router_and_no_end_of_one(tmp_path: Path, count: int) -> None:
    """From its first moment to its last."""
    async with starting(tmp_path, [prefiller(), decoder()], count) as router:
        await router.until_it_heeds()
        storm = asyncio.create_task(hang_up_again_and_again(router.process))
        await router.until_ready("engine-0", "engine-1")
        await asyncio.sleep(0.2)
    assert await storm > 20


async def hang_up_again_and_again(process: Process) -> int:
    """How often, until it has ended."""
    count = 0
    while process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGHUP)  # Process.send_signal would look whether it has ended, and keep that
        count += 1
        await asyncio.sleep(0.005)
    return count


@pytest.mark.parametrize("ignored", [True, False], ids=["nohup", "plain"])
async def test_a_file_that_changes_while_a_router_starts_is_read_again(tmp_path: Path, ignored: bool) -> None:
    """Under nohup, too, which has hangups ignored."""
    disposition = signal.SIG_IGN if ignored else signal.SIG_DFL
    engines, more = [prefiller(), decoder(0), decoder(1)], {"preexec_fn": lambda: hangups_are(disposition)}
    async with starting(tmp_path, engines, 1, **more) as router:
        await router.until_it_heeds()
        await asyncio.sleep(0.3)
        write(router.file, *engines)
        router.process.send_signal(signal.SIGHUP)
        await router.until_ready("engine-0", "engine-1", "engine-2")


def hangups_are(disposition: signal.Handlers) -> None:
    signal.signal(signal.SIGHUP, disposition)


@pytest.mark.parametrize("count", [1, 2])
async def test_a_router_whose_terminal_is_closed_while_it_starts_serves(tmp_path: Path, count: int) -> None:
    """As one does whose terminal is closed later."""
    terminal, end = pty.openpty()

    def own() -> None:
        os.setsid()
        fcntl.ioctl(end, termios.TIOCSCTTY, 0)

    streams = {"stdin": end, "stdout": end, "preexec_fn": own}
    async with starting(tmp_path, [prefiller(), decoder()], count, **streams) as router:
        os.close(end)
        await router.until_it_heeds()
        os.close(terminal)
        await router.until_ready("engine-0", "engine-1")


async def test_other_commands_are_ended_by_a_hangup_as_ever(tmp_path: Path) -> None:
    slow = (
        "import sys, time; sys.argv = ['schedloom', 'explain']; import schedloom.__main__ as m; import schedloom.cli\n"
    )
    wait = "schedloom.cli.main = lambda: (print('there', flush=True), time.sleep(60)); m.main()"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", slow + wait, stdout=PIPE)
    assert process.stdout is not None and await process.stdout.readline() == b"there\n"
    process.send_signal(signal.SIGHUP)
    assert await asyncio.wait_for(process.wait(), 30) == -signal.SIGHUP
