"""A4, X8: SIGHUP has the engines read again: all or nothing, in one process or several."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from schedloom.core.errors import ConfigurationError
from schedloom.router import logs, serve
from schedloom.router.app import RouterApp
from schedloom.router.commands import route
from schedloom.router.fleet.roster import Roster
from schedloom.router.reload import Reloading
from schedloom.router.settings import RouterSettings, WorkerSettings, router_settings
from tests.router.fakes import EVENTS, Answer, FakeEngine, decoder, event_bytes, prefiller
from tests.router.sockets import asgi, served
from tests.router.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

COMMAND = "import typer, schedloom.router.commands as c; typer.run(c.route)"
BODY = {"model": "fake-model", "prompt": "hello"}
WORD = {"choices": [{"index": 0, "text": "word", "finish_reason": None}]}
FINISH = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
P, D = {"url": "http://p:1", "role": "prefill"}, {"url": "http://d:1", "role": "decode"}
DECLARED = {"role": "consumer", "models": ["m"], "block_size": 16}
BOTH = DECLARED | {"role": "both"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


MOVED = {"url": "http://d:2", "role": "decode", "name": "a"}


async def reloaded(new: Callable[[], RouterSettings], **old: Any) -> list[list[WorkerSettings]]:
    """What was used after a router with ``old`` settings had read ``new`` ones."""
    used: list[list[WorkerSettings]] = []
    settings = router_settings({"workers": [P, D, MOVED | {"url": "http://d:3"}]} | old)
    roster = Roster(settings.workers)
    await Reloading(settings, new, roster, lambda: used.append([*roster.engines.values()])).reload()
    return used


async def test_engines_are_taken_from_the_file_as_it_is_by_now(caplog: pytest.LogCaptureFixture) -> None:
    new = router_settings({"workers": [P, D | {"drain": True}, D | {"url": "http://d:2"}]})
    assert await reloaded(lambda: new) == [new.workers]
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another port": ({"port": 1}, ["port cannot change while the router runs, only workers can"]),
    "several": (
        {"processes": 2, "policies": [{"name": "round_robin"}], "workers": [P, D, {"url": "http://n:1"}]},
        ["policies, processes cannot change while the router runs"],
    ),
    "a key": ({"api_keys": [{"key": "long-enough", "tenant": "t"}]}, ["api_keys cannot change"]),
    "no Decoder": ({"workers": [P]}, ["no Decoder is configured"]),
    "a name for another engine": (
        {"workers": [P, D | {"drain": True}, MOVED, {"url": "http://h:9"}]},
        ["the engine at http://d:2 cannot be named a, which is the name of the one at http://d:3 for as long as"],
    ),
    "a name for an engine that has changed": (
        {"workers": [P, D, MOVED | {"url": "http://d:3", "role": "prefill"}]},
        ["the engine at http://d:3 cannot be named a, which is the name of the one of another role or contract there"],
    ),
    "engines that do not fit": (
        {"workers": [{"url": f"http://h:{n}", "contract": BOTH | {"block_size": n}} for n in (16, 32)]},
        ["workers[1].contract: http://h:32 has KV blocks of 32 tokens"],
    ),
}


@pytest.mark.parametrize(("changed", "sentences"), REFUSED.values(), ids=REFUSED)
async def test_what_cannot_change_or_work_changes_nothing(
    changed: dict[str, Any], sentences: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    new = router_settings({"workers": [P, D]} | changed)
    assert await reloaded(lambda: new) == []
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == len(sentences)
    for text, sentence in zip(said, sentences, strict=True):
        assert text.startswith(f"nothing changes: {sentence}")
    assert "long-enough" not in caplog.text


async def test_what_nobody_foresaw_changes_nothing_either(caplog: pytest.LogCaptureFixture) -> None:
    def again() -> RouterSettings:
        raise RecursionError

    assert await reloaded(again) == []
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [
        "nothing changes: the configuration cannot be read"
    ]


async def test_a_refused_file_is_not_what_the_next_is_compared_with() -> None:
    files = iter([{"port": 1}, {"port": 1}, {}])
    used: list[Any] = []
    settings = router_settings({"workers": [P, D]})

    def again() -> RouterSettings:
        return router_settings({"workers": [P, D]} | next(files))

    reloading = Reloading(settings, again, Roster(settings.workers), lambda: used.append(None))
    for expected in (0, 0, 1):
        await reloading.reload()
        assert len(used) == expected


def asked_again(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Callable[[], RouterSettings]:
    """How a router that was started with ``arguments`` reads its configuration again."""
    import typer

    given: list[Callable[[], RouterSettings]] = []
    monkeypatch.setattr(serve, "run", lambda settings, again: given.append(again))
    monkeypatch.setattr(logs, "configure_logging", lambda level: None)
    app = typer.Typer()
    app.command()(route)
    assert CliRunner().invoke(app, arguments).exit_code == 0
    return given[0]


def test_options_win_over_the_file_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(json.dumps({"workers": [P, D], "port": 1}))
    again = asked_again(monkeypatch, "--config", str(path), "--port", "7")
    path.write_text(json.dumps({"workers": [P, D, D | {"url": "http://d:2"}], "port": 2}))
    assert (again().port, len(again().workers)) == (7, 3)
    for faulty in ("a: [", "prot: 1", json.dumps({"workers": [{"url": "h"}]})):
        path.write_text(faulty)
        with pytest.raises(ConfigurationError, match=str(path)):
            again()


def test_without_a_file_or_with_engines_named_by_options_there_is_nothing_to_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "router.yaml"
    path.write_text("port: 1\n")
    named = ["--prefill", "http://p:1", "--decode", "http://d:1"]
    with pytest.raises(ConfigurationError, match="start with --config FILE"):
        asked_again(monkeypatch, *named)()
    with pytest.raises(ConfigurationError, match=f"those of --prefill URL and --decode URL; name them in {path}"):
        asked_again(monkeypatch, *named, "--config", str(path))()


class Router:
    """A running router, its file and its log."""

    def __init__(self, process: Process, address: str, file: Path, log: Path) -> None:
        self.process = process
        self.address = address
        self._file = file
        self._log = log

    def write(self, *engines: FakeEngine, drain: FakeEngine | None = None, **more: Any) -> None:
        """Engines at their origins; and have it read."""
        write(self._file, *engines, drain=drain, **more)
        self.hangup()

    def write_text(self, text: str) -> None:
        self._file.write_text(text)
        self.hangup()

    def hangup(self) -> None:
        self.process.send_signal(signal.SIGHUP)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def children(self) -> set[int]:
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return {int(pid) for pid in text.split()}

    async def ask(self, session: str | None = None, **body: Any) -> httpx2.Response:
        headers = {"X-Session-ID": session} if session else {}
        async with httpx2.AsyncClient(base_url=self.address, timeout=PATIENCE_SECONDS) as client:
            answer: httpx2.Response = await client.post("/v1/completions", json=BODY | body, headers=headers)
            return answer

    async def states(self) -> dict[str, float]:
        """How many processes see which engine in which state."""
        async with httpx2.AsyncClient(base_url=self.address, timeout=PATIENCE_SECONDS) as client:
            page = (await client.get("/metrics")).text
        found = re.findall(r'^schedloom_router_engine_state{engine="(\S+)",state="(\S+)"} (\S+)$', page, re.MULTILINE)
        return {f"{engine} {state}": float(count) for engine, state, count in found if float(count)}

    async def until(self, **expected: float) -> None:
        wanted = {name.replace("_", " ").replace("engine ", "engine-"): count for name, count in expected.items()}
        for _ in range(1200):
            if await self.states() == wanted:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{await self.states()} instead of {wanted}: {self.log}")


def write(file: Path, *engines: FakeEngine, drain: FakeEngine | None = None, **more: Any) -> None:
    workers = [{"url": engine.origin, "drain": engine is drain} for engine in engines]
    file.write_text(json.dumps({"workers": workers, "enable_decoder_append_prefill": True, **more}))


@asynccontextmanager
async def routed(
    folder: Path, engines: list[FakeEngine], first: int, *options: str, **more: Any
) -> AsyncIterator[Router]:
    """A router of the ``first`` of ``engines``, which are all there, with ``more`` in its file."""
    file, log = folder / "router.yaml", folder / "log"
    async with AsyncExitStack() as stack:
        for engine in engines:
            engine.origin = await stack.enter_async_context(served(asgi(engine)))
        write(file, *engines[:first], **more)
        arguments = ["-c", COMMAND, "--config", str(file), "--port", "0", *options]
        opened = stack.enter_context(log.open("wb"))
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=PIPE, stderr=opened)
        try:
            assert process.stdout is not None
            line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
            match = re.search(r"http://\S+", line)
            assert match is not None, log.read_text()
            yield Router(process, match[0], file, log)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), PATIENCE_SECONDS) == 0
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.communicate()


@pytest.mark.parametrize("count", [1, 2])
async def test_engines_come_drain_and_go_at_a_signal(tmp_path: Path, count: int) -> None:
    p, one, two, three = engines = [prefiller(), decoder(0), decoder(1), decoder(2)]
    gate = asyncio.Event()
    async with routed(tmp_path, engines, 3, "--workers", str(count)) as router:
        await router.until(engine_0_ready=count, engine_1_ready=count, engine_2_ready=count)
        for engine in (one, two):
            engine.always = Answer(200, EVENTS, [event_bytes(WORD), gate, event_bytes(FINISH), event_bytes("[DONE]")])
        asked = [asyncio.create_task(router.ask(stream=True)) for _ in range(12)]
        while len(one.seen) + len(two.seen) < 12 or not one.seen:
            await asyncio.sleep(0.01)
        router.write(p, one, two, three, drain=one)
        while "engine-1 draining" not in await router.states():
            await asyncio.sleep(0.05)
        router.write(p, two, three)
        while (await router.states()).get("engine-3 ready") != count:
            await asyncio.sleep(0.05)
        before = len(one.seen)
        gate.set()
        assert {(await answer).text[-14:] for answer in asked} == {"data: [DONE]\n\n"}
        one.always = two.always = None
        await router.until(engine_0_ready=count, engine_2_ready=count, engine_3_ready=count)
        answers = [await router.ask(str(number)) for number in range(12)]
        assert {answer.status_code for answer in answers} == {200} and len(one.seen) == before
        assert {answer.headers["x-schedloom-decoder"] for answer in answers} == {"engine-2", "engine-3"}
        turns = [await router.ask(str(number)) for number in range(12)]
        assert {turn.headers["x-schedloom-decision"] for turn in turns} == {"append"}


ALIKE = ("engine-0 joins, at ", "engine-1 joins, at ", "engine-2 is new, at ", "engine-2 joins, at ", "engine-1 drains")
BY_EACH = "engine-1 has drained"


@pytest.mark.parametrize(("count", "level"), [(1, "info"), (2, "info"), (2, "debug")])
async def test_what_all_processes_see_alike_is_logged_once_and_the_rest_tells_by_which(
    tmp_path: Path, count: int, level: str
) -> None:
    p, one, two = engines = [prefiller(), decoder(0), decoder(1)]
    async with routed(tmp_path, engines, 2, "--workers", str(count), "--log-level", level) as router:
        router.write(p, one, two, drain=one)
        await router.until(engine_0_ready=count, engine_1_drained=count, engine_2_ready=count)
        processes = {f"[{pid}]" for pid in router.children}
    lines = router.log.splitlines()
    by_whom = {text: [line.split()[3] for line in lines if text in line] for text in (*ALIKE, BY_EACH)}
    told = {(text, teller) for text in ALIKE for teller in by_whom[text]}
    tellers = {teller for _, teller in told}
    assert sum(len(by_whom[text]) for text in ALIKE) == len(told) == len(ALIKE) * len(tellers)
    if count == 1:
        assert tellers == {"schedloom.router.engines:"} and by_whom[BY_EACH] == ["schedloom.router.fleet.changes:"]
    else:
        assert tellers <= processes and len(tellers) == (2 if level == "debug" else 1)
        assert set(by_whom[BY_EACH]) == processes and len(by_whom[BY_EACH]) == count


def heard(log: str, pattern: str) -> list[int]:
    """The numbers of requests that it tells so."""
    return [int(count) for count in re.findall(rf"serve: (\d+) requests? {pattern}$", log, re.MULTILINE)]


@pytest.mark.parametrize(("count", "asked"), [(1, 0), (1, 1), (2, 0), (2, 6)])
async def test_what_an_end_waits_for_is_logged_and_that_it_came(tmp_path: Path, count: int, asked: int) -> None:
    engines = _, d = [prefiller(), decoder()]
    gate = asyncio.Event()
    d.always = Answer(200, EVENTS, [event_bytes(WORD), gate, event_bytes(FINISH), event_bytes("[DONE]")])

    async def let_go() -> None:
        while sum(heard(router.log, "may still finish")) < asked:
            await asyncio.sleep(0.05)
        gate.set()

    async with routed(tmp_path, engines, 2, "--workers", str(count)) as router:
        answers = [asyncio.create_task(router.ask(stream=True)) for _ in range(asked)]
        while len(d.seen) < asked:
            await asyncio.sleep(0.01)
        letting_go = asyncio.create_task(let_go())
    await letting_go
    assert {(await answer).text[-14:] for answer in answers} <= {"data: [DONE]\n\n"}
    told = [line.partition("schedloom.router.whole: ")[2] for line in router.log.splitlines()]
    assert [line for line in told if line] == ["the router ends, within 30 s", "the router has ended"]
    assert sum(heard(router.log, "may still finish")) == asked and "cut off" not in router.log
    assert 0 not in heard(router.log, "may still finish")


@pytest.mark.parametrize("count", [1, 2])
async def test_what_an_end_cuts_off_is_logged(tmp_path: Path, count: int) -> None:
    engines = _, d = [prefiller(), decoder()]
    d.always = Answer(200, EVENTS, [event_bytes(WORD), asyncio.Event()])
    async with routed(tmp_path, engines, 2, "--workers", str(count), shutdown_grace_seconds=0.5) as router:
        answers = [asyncio.create_task(router.ask(stream=True)) for _ in range(3)]
        while len(d.seen) < 3:
            await asyncio.sleep(0.01)
    assert ["shutting down" in answer.text for answer in await asyncio.gather(*answers)] == [True] * 3
    assert sum(heard(router.log, "did not finish in time: cut off")) == 3
    assert router.log.splitlines()[-1].endswith("schedloom.router.whole: the router has ended")


async def test_who_takes_the_first_ones_place_tells_what_all_see_alike(tmp_path: Path) -> None:
    p, one, two = engines = [prefiller(), decoder(0), decoder(1)]
    async with routed(tmp_path, engines, 2, "--workers", "2") as router:
        (joined,) = [line for line in router.log.splitlines() if "engine-1 joins" in line]
        first = int(joined.split()[3].strip("[]"))
        os.kill(first, signal.SIGKILL)
        while first in router.children or len(router.children) < 2:
            await asyncio.sleep(0.05)
        await router.until(engine_0_ready=2, engine_1_ready=2)
        router.write(p, one, two)
        await router.until(engine_0_ready=2, engine_1_ready=2, engine_2_ready=2)
        assert f"process {first} of the router was killed by signal 9; another starts" in router.log
    (told,) = [line for line in router.log.splitlines() if "engine-2 joins" in line]
    assert told.split()[3] != f"[{first}]"


@pytest.mark.parametrize("count", [1, 2])
async def test_the_only_decoder_drains_and_is_taken_back(tmp_path: Path, count: int) -> None:
    p, d = engines = [prefiller(), decoder()]
    async with routed(tmp_path, engines, 2, "--workers", str(count)) as router:
        assert (await router.ask("s")).headers["x-schedloom-decision"] == "pd"
        router.write(p, d, drain=d)
        await router.until(engine_0_ready=count, engine_1_drained=count)
        async with httpx2.AsyncClient(base_url=router.address, timeout=PATIENCE_SECONDS) as client:
            assert (await client.get("/ready")).status_code == 503
        assert (await router.ask()).status_code == 503
        assert router.log.count("no Decoder is left: every request is answered 503") == 1
        router.write(p, d)
        await router.until(engine_0_ready=count, engine_1_ready=count)
        assert (await router.ask("s")).headers["x-schedloom-decision"] == "append"


@pytest.mark.parametrize("count", [1, 2])
async def test_a_faulty_file_changes_nothing_and_is_told_once(tmp_path: Path, count: int) -> None:
    p, d, late = engines = [prefiller(), decoder(0), decoder(1)]
    async with routed(tmp_path, engines, 2, "--workers", str(count)) as router:
        for text in ("workers: [", f"workers: [{{url: '{p.origin}', drian: true}}]"):
            router.write_text(text)
            while router.log.count("nothing changes: ") < 1:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.2)
            assert router.log.count("nothing changes: ") == 1
            (tmp_path / "log").write_bytes(b"")
        router.write(p, late, max_in_flight=7)
        while "max_in_flight cannot change while the router runs" not in router.log:
            await asyncio.sleep(0.02)
        await router.until(engine_0_ready=count, engine_1_ready=count)
        assert (await router.ask()).status_code == 200
        router.write(p, d, late)
        await router.until(engine_0_ready=count, engine_1_ready=count, engine_2_ready=count)


async def test_a_process_that_is_replaced_knows_the_engines_by_the_names_of_the_others(tmp_path: Path) -> None:
    p, one, two = engines = [prefiller(), decoder(0), decoder(1)]
    async with routed(tmp_path, engines, 2, "--workers", "2") as router:
        router.write(p, two)
        await router.until(engine_0_ready=2, engine_2_ready=2)
        victim, before = min(router.children), router.children
        os.kill(victim, signal.SIGKILL)
        while len(router.children - before) < 1:
            await asyncio.sleep(0.05)
        await router.until(engine_0_ready=2, engine_2_ready=2)
        router.write(p, one, two)
        await router.until(engine_0_ready=2, engine_2_ready=2, engine_3_ready=2)
        for child in router.children:
            os.kill(child, signal.SIGHUP)  # as a terminal does, and only the supervisor heeds
        turns = [(await router.ask("s")).headers["x-schedloom-decision"] for _ in range(8)]
        assert turns == ["pd", *["append"] * 7]
        assert len(router.children & before) == 1


async def test_a_process_is_replaced_though_an_engine_that_came_later_does_not_fit(tmp_path: Path) -> None:
    p, d, odd = engines = [prefiller(), decoder(0), decoder(1, block_size=64)]
    async with routed(tmp_path, engines, 2, "--workers", "2") as router:
        router.write(p, d, odd)
        await router.until(engine_0_ready=2, engine_1_ready=2, engine_2_quarantined=2)
        victim, before = min(router.children), router.children
        os.kill(victim, signal.SIGKILL)
        while len(router.children - before) < 1:
            await asyncio.sleep(0.05)
        await router.until(engine_0_ready=2, engine_1_ready=2, engine_2_quarantined=2)
        assert len(router.children & before) == 1 and "cannot start" not in router.log


async def test_a_start_with_an_engine_that_drains_serves_by_the_others(tmp_path: Path) -> None:
    engines = [prefiller(), decoder(0), decoder(1)]
    async with AsyncExitStack() as stack:
        for engine in engines:
            engine.origin = await stack.enter_async_context(served(asgi(engine)))
        workers = [{"url": engine.origin, "drain": engine is engines[1]} for engine in engines]
        app = RouterApp(router_settings({"workers": workers}))
        await app.start()
        assert app.fleet.serves == "all" and [worker.name for worker in app.fleet.decoders] == ["engine-2"]
        await app.close()
        app = RouterApp(router_settings({"workers": workers[:2]}))
        with pytest.raises(ConfigurationError, match="every Decoder that is there drains"):
            await app.start()
        await app.close()
