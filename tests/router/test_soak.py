"""R7, R9: two thousand streams at once do no harm. The router is a process of its own, the engines are fakes."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import resource
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx2
import pytest

from schedloom.core.wire import CONTRACT_PATH
from tests.router.fakes import FakeEngine, Seen, decoder, prefiller
from tests.router.sockets import router_process
from tests.router.test_overload import MAX_GROWTH, resident

pytestmark = pytest.mark.anyio

STREAMS, EVENTS = 2_000, 8
TICK, TICKS_BETWEEN_EVENTS = 0.05, 16
AT_ONCE = 100
PATIENCE = 120
SPARE_FILES = 200
EVENT = re.compile(rb'"text":" (\d+)\.(\d+)"')
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n\r\n"
LAST = b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'


@pytest.fixture
def streams() -> Iterator[int]:
    """How many there can be: each takes two files here, and two of the router's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = STREAMS if hard == resource.RLIM_INFINITY else min(STREAMS, (hard - SPARE_FILES) // 2)
    if most < STREAMS:
        warnings.warn(f"{most} streams instead of {STREAMS}: only {hard} files may be open", stacklevel=1)
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class EngineStream:
    """One stream of a fake Decoder's: its events name it, and count."""

    def __init__(self, transport: asyncio.Transport, number: int) -> None:
        self._transport = transport
        self._number = number
        self._told = 0

    def go_on(self) -> bool:
        """Returns whether there is more."""
        if self._told == EVENTS:
            self._transport.write(_chunk(LAST) + b"0\r\n\r\n")
            return False
        event = b'data: {"choices":[{"index":0,"text":" %d.%d","finish_reason":null}]}\n\n'
        self._transport.write(_chunk(event % (self._number, self._told)))
        self._told += 1
        return True


class EngineConnection(asyncio.Protocol):
    """Answers as a fake engine does, but streams, which are put into ``streams``."""

    def __init__(self, engine: FakeEngine, streams: list[EngineStream]) -> None:
        self._engine = engine
        self._streams = streams
        self._received = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        if end and len(body) >= (int(length[1]) if length else 0):
            self._received = b""
            self._answer(head.split(b" ")[1].decode(), body)

    def _answer(self, path: str, body: bytes) -> None:
        if body and json.loads(body).get("stream"):
            self._transport.write(HEAD % (b"text/event-stream", b"transfer-encoding: chunked"))
            return self._streams.append(EngineStream(self._transport, int(json.loads(body)["user"])))
        answer = self._contract() if path == CONTRACT_PATH else self._engine._ordinary(Seen(path, {}, body)).steps[0]
        assert isinstance(answer, bytes)
        self._transport.write(HEAD % (b"application/json", b"content-length: %d" % len(answer)) + answer)
        return None

    def _contract(self) -> bytes:
        assert self._engine.contract is not None
        return self._engine.contract.model_dump_json().encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class ClientStream(asyncio.Protocol):
    """A client of one stream, which notes all that it gets."""

    def __init__(self, number: int) -> None:
        self.received = b""
        self.has_begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._number = number

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        body = json.dumps({"model": "m", "prompt": "a", "stream": True, "user": str(self._number)}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        transport.write(head % len(body) + body)

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not self.has_begun.done():
            self.has_begun.set_result(None)
        if data.endswith(b"0\r\n\r\n"):
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        for future in (self.has_begun, self.ended):
            if not future.done():
                future.set_result(None)

    @property
    def events(self) -> list[tuple[int, int]]:
        return [(int(number), int(place)) for number, place in EVENT.findall(self.received)]

    def is_whole(self) -> bool:
        """Whether every event came once and in order, and then the end."""
        fine = self.received.startswith(b"HTTP/1.1 200") and b'"error"' not in self.received
        every = self.events == [(self._number, place) for place in range(EVENTS)]
        return fine and every and self.received.count(b"data: [DONE]\n\n") == 1


class Town:
    """Two fake engines, a router, and the streams between them."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, going: list[EngineStream]) -> None:
        self.process = process
        self.address = address
        self._going = going

    async def begin(self, numbers: range) -> list[ClientStream]:
        """So many clients more, whose streams have begun."""
        begun: list[ClientStream] = []
        for first in range(numbers.start, numbers.stop, AT_ONCE):
            some = range(first, min(first + AT_ONCE, numbers.stop))
            begun += await asyncio.gather(*map(self._connected, some))
            while len(self._going) < len(begun) + numbers.start:
                await asyncio.sleep(TICK)
        return begun

    async def _connected(self, number: int) -> ClientStream:
        host, _, port = self.address.removeprefix("http://").partition(":")
        _, stream = await asyncio.get_running_loop().create_connection(lambda: ClientStream(number), host, int(port))
        return stream

    async def play(self) -> None:
        """An event for every stream, a part of them at each tick, again and again to their ends."""
        going = [self._going[place::TICKS_BETWEEN_EVENTS] for place in range(TICKS_BETWEEN_EVENTS)]
        while any(going):
            for place, some in enumerate(going):
                going[place] = [stream for stream in some if stream.go_on()]
                await asyncio.sleep(TICK)

    async def asks_beside(self) -> int:
        async with httpx2.AsyncClient(base_url=self.address, timeout=PATIENCE) as client:
            answer = await client.post("/v1/completions", json={"model": "m", "prompt": "a"})
            return int(answer.status_code)


@asynccontextmanager
async def town() -> AsyncIterator[Town]:
    loop, going = asyncio.get_running_loop(), list[EngineStream]()
    async with AsyncExitStack() as stack:
        urls = []
        for engine in (prefiller(), decoder()):
            server = await loop.create_server(functools.partial(EngineConnection, engine, going), "127.0.0.1", 0)
            stack.callback(server.close)
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        process, address = await stack.enter_async_context(router_process(urls[:1], urls[1:]))
        yield Town(process, address, going)


@pytest.mark.filterwarnings("always:.* streams instead of")
async def test_two_thousand_streams_at_once_are_whole_and_take_little(streams: int) -> None:
    async with town() as made:
        clients = await made.begin(range(streams // 10))
        before = resident(made.process)
        clients += await made.begin(range(len(clients), streams))
        playing = asyncio.ensure_future(made.play())
        await asyncio.gather(*[client.has_begun for client in clients])
        assert not playing.done() and await asyncio.wait_for(made.asks_beside(), PATIENCE) == 200
        await asyncio.wait_for(asyncio.gather(playing, *[client.ended for client in clients]), PATIENCE)
        growth = resident(made.process) - before
    assert [client.events for client in clients if not client.is_whole()] == []
    assert growth <= MAX_GROWTH
