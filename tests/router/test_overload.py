"""R7: at twice the load that its engines bear, the router serves as much as ever, and tells the rest at once."""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from schedloom.core.wire import CONTRACT_PATH
from schedloom.router.app import RouterApp
from schedloom.router.laboratory.client import Client
from schedloom.router.laboratory.clock import simulate
from tests.router.conftest import settings_for
from tests.router.fakes import Answer, FakeEngine, FakeUpstream, Seen, decoder, prefiller
from tests.router.sockets import raw_server, router_process

SLOTS, SERVICE_SECONDS = 8, 0.05
PATIENCE = 0.25
"""An answer that comes later is worth nothing to its client, which waits for it all the same."""
SECONDS = 5.0


STREAMS, EXCESS = 300, 900
"""What a real router serves at once, and what comes beside it."""
LARGE_BODY = b'{"model":"fake-model","stream":true,"prompt":"%b"}' % (b"word " * 20_000)
SMALL_BODY = b'{"model":"fake-model","stream":true,"prompt":"word"}'
MAX_GROWTH = 64 * 2**20
SOON = 0.01


class SlottedEngine(FakeEngine):
    """It serves so many at once, and whoever else comes waits for as long as it takes."""

    async def answer(self, seen: Seen) -> Answer:
        if seen.path == CONTRACT_PATH:
            return await super().answer(seen)
        async with self.slots:
            await asyncio.sleep(SERVICE_SECONDS)
            return await super().answer(seen)

    slots: asyncio.Semaphore


@dataclass
class Clients:
    """What becomes of requests on a simulated clock."""

    client: Client
    in_time: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    slowest_refusal: float = 0.0

    @property
    def goodput(self) -> float:
        return self.in_time / SECONDS

    async def closed(self, count: int) -> None:
        """Each asks again when it was answered, and those that were refused when they were told to."""
        await asyncio.gather(*[self._again_and_again() for _ in range(count)])

    async def open(self, rate: float) -> None:
        """They come whatever becomes of those before."""
        asked = []
        for _ in range(int(rate * SECONDS)):
            asked.append(asyncio.ensure_future(self._ask()))
            await asyncio.sleep(1 / rate)
        await asyncio.gather(*asked)

    async def _again_and_again(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + SECONDS
        while loop.time() < end:
            await asyncio.sleep(await self._ask())

    async def _ask(self) -> float:
        """Seconds after which to come again."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        received = await self.client.chat()
        took = loop.time() - asked
        self.statuses[received.status] += 1
        self.in_time += received.status == 200 and took <= PATIENCE
        if received.status == 200:
            return 0.0
        self.slowest_refusal = max(self.slowest_refusal, took)
        return float(received.headers["retry-after"])


@asynccontextmanager
async def clients() -> AsyncIterator[Clients]:
    engines = [SlottedEngine(one.origin, one.contract) for one in (prefiller(), decoder())]
    for engine in engines:
        engine.slots = asyncio.Semaphore(SLOTS)
    settings = settings_for(engines, max_in_flight=3 * SLOTS, max_waiting=SLOTS)
    app = RouterApp(settings, FakeUpstream(engines), clock=asyncio.get_running_loop().time)
    await app.start()
    yield Clients(Client(app))
    await app.close()


async def peak() -> float:
    async with clients() as calm:
        await calm.closed(3 * SLOTS)
        assert set(calm.statuses) == {200}
        return calm.goodput


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_goodput_at_twice_the_load_is_that_of_the_peak(loop: str) -> None:
    async def overload() -> Clients:
        async with clients() as crowd:
            await (crowd.closed(6 * SLOTS) if loop == "closed" else crowd.open(2 * best))
            return crowd

    best = simulate(peak())
    crowd = simulate(overload())
    assert best > 0.9 * SLOTS / SERVICE_SECONDS
    assert crowd.goodput >= 0.9 * best
    assert set(crowd.statuses) == {200, 503} and crowd.statuses[503] >= 50
    assert crowd.slowest_refusal <= 0.01


class PacedEngine:
    """It streams a word now and then until it is told to finish; a Prefiller answers at once."""

    def __init__(self, engine: FakeEngine) -> None:
        self.finish = asyncio.Event()
        self._engine = engine

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            raw = await reader.readexactly(int(length[1]) if length else 0)
            seen = Seen(head.split(b" ")[1].decode(), {}, raw)
            answer = await self._engine.answer(seen)
            self._engine.seen.clear()
            await self._say(answer, writer)

    async def _say(self, answer: Answer, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 %d Said\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head % (answer.status, answer.kind))
        *events, last = [step for step in answer.steps if isinstance(step, bytes)]
        while events and not self.finish.is_set():
            writer.write(_chunk(events[0]))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.finish.wait(), 0.2)
        writer.write(_chunk(last) + b"0\r\n\r\n")
        await writer.drain()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Visitors:
    """Clients of a real router, each on a connection of its own."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("http://").partition(":")
        self._address = (host, int(port))
        self._begun = 0

    async def streams(self, count: int) -> list[asyncio.Future[bytes]]:
        """They have all begun."""
        expected = self._begun + count
        streams: list[asyncio.Future[bytes]] = [asyncio.ensure_future(self._stream()) for _ in range(count)]
        while self._begun < expected:
            await asyncio.sleep(0.01)
        return streams

    async def _stream(self) -> bytes:
        async with self._asking(SMALL_BODY) as reader:
            first = await reader.readuntil(b"data: ")
            self._begun += 1
            return first + await reader.readuntil(b"[DONE]")

    async def seconds_to_a_refusal(self) -> float:
        async with self._asking(LARGE_BODY) as reader:
            asked = time.monotonic()
            head = await reader.readuntil(b"\r\n\r\n")
            seconds = time.monotonic() - asked
            assert head.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in head
            return seconds

    @asynccontextmanager
    async def _asking(self, body: bytes) -> AsyncIterator[asyncio.StreamReader]:
        reader, writer = await asyncio.open_connection(*self._address)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        yield reader
        writer.close()


def resident(process: asyncio.subprocess.Process) -> int:
    """Bytes of memory that it occupies."""
    pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.anyio
async def test_a_full_router_refuses_at_once_and_stays_small(tmp_path: Path) -> None:
    """A process of its own, with as many streams as it may serve, to which large requests come beside."""
    path = tmp_path / "router.yaml"
    path.write_text(f"max_in_flight: {STREAMS}\nmax_waiting: 0\n")
    engines = [PacedEngine(one) for one in (prefiller(), decoder())]
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(raw_server(engine.serve)) for engine in engines]
        process, address = await stack.enter_async_context(router_process(urls[:1], urls[1:], "--config", str(path)))
        visitors = Visitors(address)
        streams = await visitors.streams(STREAMS // 10)
        before = resident(process)
        streams += await visitors.streams(STREAMS - len(streams))
        seconds = [statistics.median(await refusals(visitors))]
        while len(seconds) < 3 or (min(seconds) > SOON and len(seconds) < 10):
            seconds.append(statistics.median(await refusals(visitors)))
        growth = resident(process) - before
        for engine in engines:
            engine.finish.set()
        assert all(answer.startswith(b"HTTP/1.1 200") for answer in await asyncio.gather(*streams))
    assert min(seconds) <= SOON
    assert growth <= MAX_GROWTH


async def refusals(visitors: Visitors) -> list[float]:
    """How long each took."""
    asked = []
    for _ in range(EXCESS // 3):
        asked.append(asyncio.ensure_future(visitors.seconds_to_a_refusal()))
        await asyncio.sleep(0.003)
    return await asyncio.gather(*asked)
