"""B1, R12: an engine that hangs keeps nobody waiting whom another may serve. The engines are processes that stop."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from schedloom.core.wire import Role
from schedloom.router.app import RouterApp
from schedloom.router.fleet.worker import Health, Worker
from schedloom.router.http.client import HttpUpstream
from schedloom.router.http.upstream import TimedOut, Timeouts, UpstreamRequest
from schedloom.router.settings import router_settings
from tests.router.sockets import raw_server, served
from tests.router.waiting import until

pytestmark = pytest.mark.anyio

SOON: dict[str, Any] = {"health_interval_seconds": 0.2, "health_timeout_seconds": 0.5, "hung_after_seconds": 1.0}
PATIENCE = 20
"""Seconds, of which the half should do: requests that nobody gives up would wait for ten minutes."""


class Stoppable:
    """A fake engine in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.url = url
        self._process = process

    @classmethod
    async def started(cls, role: Role, *options: str) -> Stoppable:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.router.stoppable", role.value, *options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert process.stdout is not None
        return cls(process, (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip())

    async def heard(self, word: str) -> None:
        assert self._process.stdout is not None
        while (await self._process.stdout.readline()).decode().strip() != word:
            assert self._process.returncode is None

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    async def end(self) -> None:
        self._process.kill()
        await self._process.communicate()


class Town:
    """Two Prefillers and two Decoders, and a router in front of them."""

    def __init__(self, app: RouterApp, prefillers: list[Stoppable], decoders: list[Stoppable], address: str) -> None:
        self.app = app
        self.prefillers = prefillers
        self.decoders = decoders
        self.client = httpx2.AsyncClient(base_url=address, timeout=PATIENCE)

    async def ask(self, session: str | None = None, *, stream: bool) -> httpx2.Response:
        headers = {} if session is None else {"X-Session-ID": session}
        body = {"model": "m", "prompt": "a", "stream": stream}
        return await self.client.post("/v1/completions", json=body, headers=headers)

    def worker(self, engine: Stoppable) -> Worker:
        return next(worker for worker in self.app.fleet.workers if worker.origin == engine.url)

    def named(self, name: str) -> Stoppable:
        (worker,) = [worker for worker in self.app.fleet.workers if worker.name == name]
        return next(engine for engine in (*self.prefillers, *self.decoders) if engine.url == worker.origin)


@asynccontextmanager
async def town(*options: str, **settings: Any) -> AsyncIterator[Town]:
    async with AsyncExitStack() as stack:
        roles = [Role.PRODUCER] * 2 + [Role.CONSUMER] * 2
        engines = await asyncio.gather(*[Stoppable.started(role, *options) for role in roles])
        for engine in engines:
            stack.push_async_callback(engine.end)
        workers = [{"url": engine.url} for engine in engines]
        app = RouterApp(
            router_settings({"workers": workers, "enable_decoder_append_prefill": True, **SOON, **settings})
        )
        await app.start()
        stack.push_async_callback(app.close)
        made = Town(app, engines[:2], engines[2:], await stack.enter_async_context(served(app)))
        await stack.enter_async_context(made.client)
        yield made
        assert sum(worker.in_flight for worker in app.fleet.workers) == 0


async def first_asked(engines: list[Stoppable]) -> Stoppable:
    heard = {asyncio.ensure_future(engine.heard("asked")): engine for engine in engines}
    done, rest = await asyncio.wait(heard, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    return heard[done.pop()]


async def hold(engines: list[Stoppable]) -> None:
    for engine in engines:
        engine.tell("hold")
        await asyncio.wait_for(engine.heard("holding"), PATIENCE)


@pytest.mark.parametrize("stream", [False, True])
async def test_whoever_waits_for_an_engine_that_stops_is_served_by_another(stream: bool) -> None:
    async with town() as made:
        first = await made.ask("s", stream=stream)
        owner = made.named(first.headers["x-schedloom-decoder"])
        await served_elsewhere(made, [owner], "s", "fallback", stream)
        await served_elsewhere(made, made.prefillers, None, "pd", stream)
        await served_elsewhere(made, made.decoders, None, "pd", stream)


async def served_elsewhere(made: Town, pool: list[Stoppable], session: str | None, decision: str, stream: bool) -> None:
    """One of ``pool`` stops while it has a request, and goes on later."""
    await hold(pool)
    request = asyncio.ensure_future(made.ask(session, stream=stream))
    stopped = await first_asked(pool)
    stopped.stop()
    for engine in pool:
        engine.tell("go")
    answer = await request
    assert (answer.status_code, answer.text.count(" word")) == (200, 3)
    assert answer.headers["x-schedloom-decision"] == decision
    assert made.worker(stopped).health is Health.DOWN
    stopped.go_on()
    await until(lambda: made.worker(stopped).health is Health.READY)
    await asyncio.gather(*[made.ask(stream=stream) for _ in range(6)])
    await asyncio.wait_for(stopped.heard("asked"), PATIENCE)


async def test_a_stream_that_has_begun_may_go_on_when_its_engine_does() -> None:
    async with town("begin") as made:
        await hold(made.decoders)
        body = {"model": "m", "prompt": "a", "stream": True}
        async with made.client.stream("POST", "/v1/completions", json=body) as response:
            parts = response.aiter_bytes()
            answer = await anext(parts)
            stopped = made.named(response.headers["x-schedloom-decoder"])
            stopped.stop()
            stopped.tell("go")
            await until(lambda: made.worker(stopped).health is Health.DOWN)
            await asyncio.sleep(2 * SOON["hung_after_seconds"])
            stopped.go_on()
            answer += b"".join([part async for part in parts])
        assert answer.count(b" word") == 3 and answer.endswith(b"data: [DONE]\n\n")


class Request(UpstreamRequest):
    """One that a client waits for until its answer's body has begun."""

    def waits(self, has_begun: bool) -> bool:
        return not has_begun


async def test_what_waits_for_its_first_output_is_given_up_and_nothing_else() -> None:
    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        if path != b"/silent":
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        if path == b"/begun":
            writer.write(b"4\r\nword\r\n")
        await reader.read()

    upstream = HttpUpstream()
    async with raw_server(server) as origin:
        silent = asyncio.ensure_future(upstream.send(Request(origin, "GET", "/silent")))
        page = asyncio.ensure_future(upstream.send(UpstreamRequest(origin, "GET", "/silent")))
        head, begun = [await upstream.send(Request(origin, "GET", path)) for path in ("/head", "/begun")]
        assert await begun.read() == b"word"
        await asyncio.sleep(0.05)
        before = asyncio.get_running_loop().time()
        assert 0 < upstream.heard_at(origin) < before
        assert (upstream.give_up("http://elsewhere:1"), upstream.give_up(origin)) == (0, 2)
        with pytest.raises(TimedOut):
            await silent
        with pytest.raises(TimedOut):
            await head.read()
        rest = asyncio.ensure_future(begun.read())
        await asyncio.wait({page, rest}, timeout=0.1)
        assert not page.done() and not rest.done()
        for task in (page, rest):
            task.cancel()
        begun.close()
    await upstream.close()


@pytest.mark.parametrize("way", ["close", "keep", "cut", "left", "broken"])
async def test_what_came_is_known_when_its_connection_is_no_more(way: str) -> None:
    """An engine that is too busy to say how it is may still have answered."""

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        length = b"connection: close\r\n" if way == "close" else b""
        size = b"4" if way in ("close", "keep") else b"9"
        writer.write(b"HTTP/1.1 200 OK\r\n" + length + b"content-length: " + size + b"\r\n\r\nword")
        if way in ("left", "broken"):
            await reader.read()

    timeouts = Timeouts(silence=0.1 if way == "broken" else 60.0)
    upstream, now = HttpUpstream(), asyncio.get_running_loop().time
    async with raw_server(server) as origin:
        asked_at = now()
        response = await upstream.send(UpstreamRequest(origin, "GET", "/", timeouts=timeouts))
        assert await response.read() == b"word"
        if way == "broken":
            with pytest.raises(TimedOut):
                await response.read()
        response.close()
        await until(lambda: not upstream._open)
        assert asked_at <= upstream.heard_at(origin) <= now()
        upstream.forget(origin)
        assert upstream.heard_at(origin) == 0.0
    await upstream.close()
