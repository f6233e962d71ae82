"""B1, X8: several processes that are one router: one port, one set of sessions and figures, one life."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import httpx2
import pytest
from pydantic import SecretStr

from schedloom.core.errors import ConfigurationError
from schedloom.router.processes.assignment import for_each
from schedloom.router.serve import listen
from schedloom.router.settings import router_settings
from tests.router.fakes import EVENTS, Answer, FakeEngine, decoder, event_bytes, prefiller
from tests.router.sockets import asgi, refuses, served
from tests.router.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio

COMMAND = "import typer, schedloom.router.commands as c; typer.run(c.route)"
IDLE_SOCKETS = 8
"""At most so many are open in a process that serves nobody: its own, and one to each engine."""

BODY = {"model": "fake-model", "prompt": "hello"}
WORD = {"choices": [{"index": 0, "text": "word", "finish_reason": None}]}
FINISH = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}


class Router:
    """A running router of several processes, and its engines."""

    def __init__(self, process: Process, address: str, engines: list[FakeEngine]) -> None:
        self.process = process
        self.address = address
        self.engines = engines
        self._told = False

    @property
    def children(self) -> set[int]:
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return {int(pid) for pid in text.split()}

    def stop(self) -> None:
        """Once: a process that has ended all but itself hears a second signal no more, and is ended by it."""
        if not self._told:
            self._told = True
            self.process.send_signal(signal.SIGTERM)

    async def ask(self, session: str | None = None) -> httpx2.Response:
        """By a connection of its own, so that the kernel chooses the process."""
        headers = {"X-Session-ID": session} if session else {}
        async with httpx2.AsyncClient(base_url=self.address, timeout=PATIENCE_SECONDS) as client:
            answer: httpx2.Response = await client.post("/v1/completions", json=BODY, headers=headers)
            return answer

    async def figure(self, name: str) -> float:
        async with httpx2.AsyncClient(base_url=self.address, timeout=PATIENCE_SECONDS) as client:
            page = (await client.get("/metrics")).text
        found = re.findall(rf"^schedloom_router_{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
        return sum(map(float, found))

    async def counts(self, name: str, value: float) -> None:
        """Each process tells the others its figures once in a while, and an answer leaves before it is counted."""
        for _ in range(600):
            if await self.figure(name) >= value:
                break
            await asyncio.sleep(0.05)
        assert await self.figure(name) == value


@asynccontextmanager
async def routed(*options: str, status: int = 0) -> AsyncIterator[Router]:
    """A router in front of a Prefiller and two Decoders; told to end afterwards, it does so with ``status``."""
    engines = [prefiller(), decoder(0), decoder(1)]
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(served(asgi(engine))) for engine in engines]
        named = ["--prefill", urls[0], *(part for url in urls[1:] for part in ("--decode", url))]
        arguments = [*named, "--port", "0", "--workers", "2", "--enable-decoder-append-prefill", *options]
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", COMMAND, *arguments, stdout=PIPE)
        try:
            assert process.stdout is not None
            line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
            match = re.search(r"http://\S+", line)
            assert match is not None, line
            router = Router(process, match[0], engines)
            yield router
            with suppress(ProcessLookupError):
                router.stop()
            rest, _ = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
            assert (process.returncode, rest) == (status, b"")
        finally:
            with suppress(ProcessLookupError):
                process.kill()


async def test_sessions_and_figures_are_those_of_one_router() -> None:
    async with routed() as router:
        assert len(router.children) == 2
        turns = [(await router.ask("s")).headers["x-schedloom-decision"] for _ in range(12)]
        assert turns == ["pd", *["append"] * 11]
        await router.counts("requests_total", 12)
        assert await router.figure("local_attempts_total") == 11
        assert await router.figure("in_flight") == 0
        assert await router.figure("engine_state") == 2 * len(router.engines)
        assert await router.figure("session_store_errors_total") == 0


async def test_both_processes_serve() -> None:
    async with routed() as router:
        gate = asyncio.Event()
        for engine in router.engines[1:]:
            engine.always = Answer(200, EVENTS, [event_bytes(WORD), gate, event_bytes(FINISH), event_bytes("[DONE]")])
        asked = [asyncio.create_task(router.ask()) for _ in range(24)]
        await until(lambda: sum(len(engine.seen) for engine in router.engines[1:]) == 24)
        await router.counts("in_flight", 24)
        busy = [pid for pid in router.children if _open_sockets(pid) > IDLE_SOCKETS]
        gate.set()
        assert {(await one).status_code for one in asked} == {200}
    assert len(busy) == 2


def _open_sockets(pid: int) -> int:
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += os.readlink(entry).startswith("socket")
    return found


async def test_a_process_that_dies_is_replaced_and_nothing_counted_is_lost() -> None:
    async with routed() as router:
        for number in range(8):
            assert (await router.ask(str(number))).headers["x-schedloom-decision"] == "pd"
        await router.counts("requests_total", 8)
        before = router.children
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        await until(lambda: len(router.children - {victim}) == 2)
        statuses = []
        for number in range(8):
            with suppress(httpx2.TransportError):
                statuses.append((await router.ask(str(number))).headers["x-schedloom-decision"])
        assert len(statuses) >= 7 and set(statuses) == {"append"}
        await router.counts("requests_total", 8 + len(statuses))
        assert len(router.children & before) == 1


def _has_loaded(pid: int, library: str) -> bool:
    """Whether the command of ``pid`` has; before it runs, a new process is its parent's likeness, libraries and all."""
    runs_its_own = b"processes.child" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return runs_its_own and library in Path(f"/proc/{pid}/maps").read_text()


def _hears_hangup(pid: int) -> bool:
    ignored = re.search(r"^SigIgn:\s+(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert ignored is not None
    return not int(ignored[1], 16) & 1 << signal.SIGHUP - 1


async def test_a_process_that_starts_hears_no_hangup() -> None:
    async with routed() as router:
        before = router.children
        os.kill(min(before), signal.SIGKILL)
        await until(lambda: router.children - before)
        [heir] = router.children - before
        while not _has_loaded(heir, "uvloop"):
            await asyncio.sleep(0.001)
        assert not _hears_hangup(heir)
        os.kill(heir, signal.SIGHUP)
        await asyncio.sleep(0.1)
        assert heir in router.children


LOUD = """
from schedloom.core.hookspecs import hookimpl
from schedloom.policies.round_robin import RoundRobin

print("loud as it comes")


class Loud(RoundRobin):
    name = "loud"

    @hookimpl
    def score_workers(self, leg, candidates):
        print("and loud for each request" * 1000)
        return [0.0] * len(candidates)
"""


async def test_what_policies_print_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    (tmp_path / "loud-1.dist-info").mkdir()
    (tmp_path / "loud-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1\n")
    (tmp_path / "loud-1.dist-info" / "entry_points.txt").write_text("[schedloom.policies]\nloud = loud:Loud\n")
    (tmp_path / "router.yaml").write_text("policies: [{name: loud}]")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    async with routed("--config", str(tmp_path / "router.yaml")) as router:
        for _ in range(20):
            assert (await router.ask()).status_code == 200


async def test_sigterm_lets_every_process_finish_what_is_under_way() -> None:
    async with routed() as router:
        gate = asyncio.Event()
        for engine in router.engines[1:]:
            engine.always = Answer(200, EVENTS, [event_bytes(WORD), gate, event_bytes(FINISH), event_bytes("[DONE]")])
        asked = [asyncio.create_task(router.ask()) for _ in range(12)]
        await until(lambda: sum(len(engine.seen) for engine in router.engines[1:]) == 12)
        router.stop()
        await until(lambda: refuses(router.address))
        gate.set()
        assert {(await one).text.endswith("data: [DONE]\n\n") for one in asked} == {True}


async def test_nobody_is_left_when_the_supervisor_is_killed() -> None:
    async with routed(status=-signal.SIGKILL) as router:
        children = router.children
        router.process.kill()
        await until(lambda: not any(map(_is_running, children)))


def _is_running(pid: int) -> bool:
    """Who has ended and whom nobody has asked about is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def run_to_the_end(*arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", COMMAND, *arguments, "--workers", "2", stdout=PIPE, stderr=PIPE
    )
    out, complaint = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), complaint.decode()


async def test_what_one_process_cannot_do_ends_all_with_one_sentence() -> None:
    engines = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1/d", "--port", "0"]
    status, out, complaint = await run_to_the_end(*engines)
    assert (status, out) == (1, "")
    assert complaint.count("no Prefiller can be reached") == 1


async def test_a_port_in_use_is_told() -> None:
    taken = listen("127.0.0.1", 0)
    port = str(taken.getsockname()[1])
    status, _, complaint = await run_to_the_end("--prefill", "http://h:1", "--decode", "http://h:2", "--port", port)
    taken.close()
    assert status == 1 and f"port {port} of 127.0.0.1 is in use" in complaint


def test_limits_are_shared_out_and_secrets_are_the_same() -> None:
    values = {"workers": [{"url": "http://h:1"}], "processes": 3, "max_in_flight": 100, "max_waiting": 0}
    settings = for_each(router_settings(values), 9000)
    assert (settings.max_in_flight, settings.max_waiting, settings.port) == (34, 0, 9000)
    assert settings.secret is not None and len(settings.secret.get_secret_value()) == 64
    given = router_settings(values | {"secret": "told"})
    assert for_each(given, 9000).secret == SecretStr("told")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_a_router_needs_a_process() -> None:
    with pytest.raises(ConfigurationError, match="processes"):
        router_settings({"workers": [{"url": "http://h:1"}], "processes": 0})
