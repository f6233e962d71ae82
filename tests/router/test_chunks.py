"""Events that a client gets in the chunks in which the engine sent them (B1), and those that it does not (X8)."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schedloom.core.continuation import HandBack
from schedloom.router.http.chunks import chunk_of, data_of, is_chunk_of_json
from schedloom.router.http.clients import Clients, Limits
from schedloom.router.http.connection import Idle, UpstreamConnection
from schedloom.router.http.exchange import ClientExchange
from schedloom.router.http.line import line_of
from schedloom.router.http.outbox import Outbox
from schedloom.router.http.protocol import ClientConnection
from schedloom.router.http.upstream import BrokenOff, Timeouts, UpstreamRequest
from schedloom.router.http.upstream_exchange import UpstreamExchange
from schedloom.router.relay import Outcome, relay
from schedloom.router.reply import Reply
from schedloom.router.transfer.turn import Turn
from tests.router.test_server import connected
from tests.router.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
WORD = b'data: {"choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
PATIENT = Timeouts(PATIENCE_SECONDS, PATIENCE_SECONDS)


class FakeTransport(asyncio.Transport):
    """To an engine of which the test says what it sends, and in which reads that arrives."""

    closed = False
    paused = False

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None: ...

    def write(self, data: object) -> None: ...

    def writelines(self, list_of_data: object) -> None: ...

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


def connection(transport: FakeTransport | None = None) -> UpstreamConnection:
    made = UpstreamConnection(asyncio.get_running_loop(), "http://engine", Idle(), set(), Outbox())
    made.connection_made(transport or FakeTransport())
    return made


def asked(by: UpstreamConnection) -> UpstreamExchange:
    return by.send(UpstreamRequest("http://engine", "POST", "/x", timeouts=PATIENT), b"")


# What is a chunk


def by_the_letter(data: bytes) -> bool:
    match = re.fullmatch(rb"([1-9a-f][0-9a-f]*)\r\n(.*\}\n\n)\r\n", data, re.DOTALL)
    return match is not None and int(match[1], 16) == len(match[2]) and len(data) < 4096


@pytest.mark.parametrize("size", [*range(3, 300), 4080, 4086, 4087, 4088, 4089, 4090, 4096, 70_000])
def test_a_chunk_of_json_is_known_by_its_size(size: int) -> None:
    data = b"." * (size - 3) + b"}\n\n"
    chunk = chunk_of(data)
    assert data_of(chunk) == data
    assert is_chunk_of_json(chunk) == by_the_letter(chunk) == (len(chunk) < 4096)
    for wrong in (chunk[1:], b"0" + chunk, chunk + chunk, chunk[:-1], chunk.replace(b"}", b"]"), b"\n" + chunk):
        assert is_chunk_of_json(wrong) == by_the_letter(wrong) is False


@given(
    st.binary(max_size=40),
    st.sampled_from([b"%x\r\n", b"%X\r\n", b"0%x\r\n", b"%x;a\r\n", b"0x%x\r\n"]),
    st.integers(-2, 2),
)
@example(b"." * 7, b"%x\r\n", 0)
@example(b"." * 8, b"%X\r\n", 0)
def test_nothing_else_passes_for_one(data: bytes, line: bytes, off: int) -> None:
    chunk = line % max(len(data) + 3 + off, 0) + data + b"}\n\n\r\n"
    assert is_chunk_of_json(chunk) == by_the_letter(chunk)


# In whatever reads it arrives

SPELLED = (b"%x\r\n%b\r\n", b"%X\r\n%b\r\n", b"00%x\r\n%b\r\n", b"%x;name=value\r\n%b\r\n")
PART = st.sampled_from([WORD, WORD + WORD, WORD[:20], WORD[20:], DONE, b": wait\n\n", b"5\r\n{}\n\n\r\n", b"1\r\n"])
CHUNKS = st.lists(st.tuples(st.sampled_from(SPELLED), PART), min_size=1, max_size=8)


class Poured:
    """What came out of an answer, and how."""

    def __init__(self, enough_after: int = -1) -> None:
        self.parts: list[bytes] = []
        self.framed: list[bytes] = []
        self._enough_after = enough_after

    def data(self, data: bytes) -> bool:
        self.parts.append(data)
        return len(self.parts) != self._enough_after

    def chunk(self, chunk: bytes) -> bool:
        self.framed.append(chunk)
        return self.data(data_of(chunk))

    async def all_of(self, exchange: UpstreamExchange) -> bytes:
        while await exchange.pour(self.data, self.chunk):
            pass
        return b"".join(self.parts)


async def read_by_read(by: UpstreamConnection, stream: bytes, cuts: Sequence[int]) -> None:
    """Lets who waits for the answer look at it now and then."""
    edges = sorted({cut % len(stream) for cut in cuts} | {0, len(stream)})
    for begin, end in itertools.pairwise(edges):
        by.data_received(stream[begin:end])
        if end % 2:
            await asyncio.sleep(0)


@given(CHUNKS, st.lists(st.integers(0, 2000), max_size=12), st.integers(-1, 4))
@example([(SPELLED[0], WORD)] * 3, [len(HEAD + chunk_of(WORD)), len(HEAD + chunk_of(WORD) * 2)], -1)
@example([(SPELLED[0], WORD)] * 2, [len(HEAD + chunk_of(WORD)), len(HEAD + chunk_of(WORD)) + 1], -1)
def test_all_comes_out_as_it_went_in(chunks: list[tuple[bytes, bytes]], cuts: list[int], enough: int) -> None:
    async def out() -> None:
        by = connection()
        for _ in range(2):
            exchange, poured = asked(by), Poured(enough)
            stream = HEAD + b"".join(line % (len(data), data) for line, data in chunks)
            reading = asyncio.ensure_future(poured.all_of(exchange))
            await read_by_read(by, stream, [*cuts, len(HEAD)])
            by.data_received(LAST)
            assert await reading == b"".join(data for _, data in chunks)
            assert all(by_the_letter(chunk) for chunk in poured.framed)

    asyncio.run(out())


async def begun(by: UpstreamConnection) -> tuple[UpstreamExchange, Poured, asyncio.Task[bytes]]:
    exchange, poured = asked(by), Poured()
    by.data_received(HEAD + chunk_of(WORD))
    reading = asyncio.ensure_future(poured.all_of(exchange))
    await asyncio.sleep(0)
    return exchange, poured, reading


async def test_a_chunk_that_comes_alone_is_given_as_it_is() -> None:
    exchange, poured, reading = await begun(by := connection())
    for _ in range(3):
        by.data_received(chunk_of(WORD))
    by.data_received(chunk_of(WORD) * 2)
    by.data_received(LAST)
    assert await reading == WORD * 6
    assert poured.framed == [chunk_of(WORD)] * 3
    assert exchange.pieces == 6


@pytest.mark.parametrize("begin", [b"1", b"41\r", b"41\r\n", b"41\r\n" + WORD[:20], chunk_of(WORD)[:-2]])
async def test_what_comes_in_the_midst_of_a_chunk_is_none(begin: bytes) -> None:
    _, poured, reading = await begun(by := connection())
    by.data_received(chunk_of(WORD) + begin)
    by.data_received(chunk_of(WORD))
    assert not poured.framed
    reading.cancel()


async def used() -> UpstreamConnection:
    """A connection whose last answer was in chunks."""
    _, _, reading = await begun(by := connection())
    by.data_received(chunk_of(WORD))
    by.data_received(LAST)
    await reading
    return by


async def test_an_answer_that_is_not_in_chunks_has_none() -> None:
    by = await used()
    exchange, poured, body = asked(by), Poured(), chunk_of(WORD) * 2
    by.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body))
    reading = asyncio.ensure_future(poured.all_of(exchange))
    await asyncio.sleep(0)
    for _ in range(2):
        by.data_received(chunk_of(WORD))
    assert await reading == body
    assert not poured.framed


async def test_what_nobody_asked_for_ends_the_connection() -> None:
    by = await used()
    by.data_received(chunk_of(WORD))
    assert by.transport.is_closing()


async def test_what_comes_before_garbage_is_given_first() -> None:
    _, poured, reading = await begun(by := connection())
    by.data_received(chunk_of(WORD) + b"garbage")
    with pytest.raises(BrokenOff):
        await reading
    assert poured.parts == [WORD] * 2
    assert by.transport.is_closing()


async def test_a_client_that_has_enough_waits_for_what_comes_next() -> None:
    by = connection()
    exchange, poured = asked(by), Poured(enough_after=2)
    by.data_received(HEAD + chunk_of(WORD))
    reading = asyncio.ensure_future(exchange.pour(poured.data, poured.chunk))
    await asyncio.sleep(0)
    for _ in range(3):
        by.data_received(chunk_of(WORD))
    assert not reading.done()
    assert await reading
    assert poured.parts == [WORD] * 2
    assert await asyncio.wait_for(exchange.read(), PATIENCE_SECONDS) == WORD * 2


async def test_a_client_that_waits_no_more_gets_no_more() -> None:
    exchange, poured, reading = await begun(by := connection())
    reading.cancel()
    await asyncio.wait([reading])
    by.data_received(chunk_of(WORD))
    assert poured.parts == [WORD]
    assert await asyncio.wait_for(exchange.read(), PATIENCE_SECONDS) == WORD


async def test_an_answer_that_is_told_when_it_is_late_is_told_whole() -> None:
    by, told = connection(), []
    request = UpstreamRequest("http://engine", "POST", "/x", timeouts=PATIENT)
    request.on_late_answer = lambda status, body: told.append((status, body))
    exchange, poured = by.send(request, b""), Poured()
    by.data_received(HEAD + chunk_of(WORD))
    reading = asyncio.ensure_future(poured.all_of(exchange))
    await asyncio.sleep(0)
    by.data_received(chunk_of(WORD))
    reading.cancel()
    await asyncio.wait([reading])
    exchange.close()
    by.data_received(chunk_of(WORD) + LAST)
    assert told == [(200, WORD * 3)]


async def test_an_error_of_the_client_is_raised_where_it_waits() -> None:
    by = connection()

    def fail(chunk: bytes) -> bool:
        raise KeyError(chunk)

    exchange = asked(by)
    by.data_received(HEAD + chunk_of(WORD))
    reading = asyncio.ensure_future(exchange.pour(lambda data: True, fail))
    await asyncio.sleep(0)
    by.data_received(chunk_of(WORD))
    with pytest.raises(KeyError):
        await reading


# To the client


class Relayed:
    """A client's connection, and one of an engine whose answer it gets."""

    def __init__(self, marked: bool = False, turn: Turn | None = None) -> None:
        self.marked = marked
        self.turn = turn
        self.transport = FakeTransport()
        self.engine = connection(self.transport)
        self.outcome: Outcome | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = asked(self.engine)
        self.engine.data_received(HEAD + chunk_of(WORD))
        reply = Reply(line_of(scope, receive, send))
        reply.turn = self.turn
        self.outcome = await relay(exchange, reply, local=False, marked=self.marked)


@asynccontextmanager
async def relayed(
    version: bytes = b"1.1", marked: bool = False, turn: Turn | None = None
) -> AsyncIterator[tuple[Relayed, asyncio.StreamReader]]:
    async with connected(app := Relayed(marked, turn)) as (reader, writer):
        writer.write(b"POST /v1/completions HTTP/%b\r\nhost: x\r\ncontent-length: 0\r\n\r\n" % version)
        head = await reader.readuntil(b"\r\n\r\n")
        assert (b"transfer-encoding: chunked" in head) == (version == b"1.1")
        yield app, reader


async def answer(*events: bytes, version: bytes = b"1.1", turn: Turn | None = None) -> tuple[bytes, Outcome | None]:
    """What the client gets, and what it is."""
    async with relayed(version, turn=turn) as (app, reader):
        for event in events:
            app.engine.data_received(chunk_of(event))
        app.engine.data_received(chunk_of(DONE) + LAST)
        await until(lambda: app.outcome is not None)
        ending = reader.readuntil(LAST) if version == b"1.1" else reader.read()
        return await asyncio.wait_for(ending, PATIENCE_SECONDS), app.outcome


async def test_a_client_gets_the_chunks_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    framed_here: list[bytes] = []
    write = ClientExchange.write

    def noted(self: ClientExchange, data: bytes) -> bool:
        framed_here.append(data)
        return write(self, data)

    monkeypatch.setattr(ClientExchange, "write", noted)
    said, outcome = await answer(*[WORD] * 3)
    assert said == chunk_of(WORD) * 4 + chunk_of(DONE) + LAST
    assert framed_here == [WORD]
    assert outcome is Outcome.SERVED


async def test_a_client_that_knows_no_chunks_gets_none() -> None:
    said, _ = await answer(*[WORD] * 3, version=b"1.0")
    assert said == WORD * 4 + DONE


async def test_a_client_that_does_not_read_stops_the_engine() -> None:
    event = b'data: {"text":"%b"}\n\n' % (b"x" * 4000)
    async with relayed() as (app, reader):
        sent = 0
        while not app.transport.paused and sent < 20_000:
            app.engine.data_received(chunk_of(event))
            sent += 1
            await asyncio.sleep(0)
        assert app.transport.paused
        app.engine.data_received(chunk_of(DONE) + LAST)
        said = b""
        while not said.endswith(LAST):
            said += await asyncio.wait_for(reader.read(1 << 20), PATIENCE_SECONDS)
    assert (said.count(event), said.count(DONE)) == (sent, 1)


async def test_the_tokens_of_an_answer_are_noted_and_kept_from_the_client() -> None:
    with_tokens = b'data: {"choices":[{"index":0,"text":"word","token_ids":[7,8]}]}\n\n'
    said, _ = await answer(*[with_tokens] * 2, turn=(turn := Turn(asked=False)))
    assert turn.tokens == [7, 8] * 2
    assert said.count(b"word") == 3
    assert b"token_ids" not in said


async def test_a_request_that_is_handed_back_is_noticed() -> None:
    reason = HandBack("preempted", [1, 2], [3]).stop_reason.encode()
    async with relayed(marked=True) as (app, _):
        app.engine.data_received(chunk_of(WORD))
        app.engine.data_received(
            chunk_of(b'data: {"choices":[{"index":0,"finish_reason":"stop","stop_reason":"%b"}]}\n\n' % reason)
        )
        app.engine.data_received(chunk_of(DONE) + LAST)
        await until(lambda: app.outcome is not None)
    assert app.outcome is Outcome.HANDED_BACK


async def test_half_an_event_never_travels_on() -> None:
    half, rest = WORD[:-3], WORD[-3:]
    said, _ = await answer(half, rest, WORD)
    assert said == chunk_of(WORD) * 3 + chunk_of(DONE) + LAST


SECRET = b'data: {"choices":[],"kv_transfer_params":{"remote_host":"10.0.0.1"}}\n\n'
ERROR = b'data: {"error":{"message":"it broke"}}\n\n'
NAMED = b'event: error\ndata: {"message":"it broke"}\n\n'


@pytest.mark.parametrize(
    "event, shown, outcome",
    [
        (SECRET, lambda said: b"10.0.0.1" not in said and b'"choices":[]' in said, Outcome.SERVED),
        (ERROR, lambda said: ERROR in said, Outcome.BROKEN),
        (NAMED, lambda said: NAMED in said, Outcome.BROKEN),
    ],
)
async def test_what_there_is_something_to_do_about_is_looked_at(
    event: bytes, shown: Callable[[bytes], bool], outcome: Outcome
) -> None:
    said, told = await answer(WORD, event, WORD)
    assert shown(said)
    assert told is outcome
    assert said.count(chunk_of(WORD)) == 3


async def test_a_server_that_frames_answers_itself_gets_no_chunks() -> None:
    said: list[bytes] = []

    async def send(message: Any) -> None:
        said.append(message.get("body", b""))

    running = asyncio.ensure_future((app := Relayed())({}, None, send))
    await until(lambda: WORD in said)
    for event in (chunk_of(WORD), chunk_of(WORD), chunk_of(DONE) + LAST):
        app.engine.data_received(event)
        await asyncio.sleep(0)
    await running
    assert b"".join(said) == WORD * 3 + DONE


async def test_chunks_for_a_client_that_has_left_go_nowhere() -> None:
    writers: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        line = line_of(scope, receive, send)
        line.start(200, b"", framed=False)
        line.write(WORD)
        writers.append(line.chunk_writer())
        await asyncio.sleep(0)

    class Written(FakeTransport):
        def write(self, data: object) -> None:
            said.append(data)

    said: list[object] = []
    client = ClientConnection(Clients(app, Limits()))
    client.connection_made(Written())
    client.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
    await asyncio.sleep(0)
    for _ in range(2):
        assert writers[0](chunk_of(WORD))
        await asyncio.sleep(0)
    before = list(said)
    assert before[-1] == chunk_of(WORD)
    client.connection_lost(None)
    assert writers[0](chunk_of(WORD))
    await asyncio.sleep(0)
    assert said == before


async def test_chunks_are_written_between_the_head_and_the_end_only() -> None:
    seen: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        line = line_of(scope, receive, send)
        line.start(200, b"", framed=False)
        seen.append(line.chunk_writer() is not None)
        line.write(WORD)
        seen.append(line.chunk_writer() is not None)
        line.end()
        seen.append(line.chunk_writer() is not None)

    for method, expected in ((b"POST", [False, True, False]), (b"HEAD", [False, False, False])):
        async with connected(app) as (reader, writer):
            writer.write(method + b" / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            await until(lambda: len(seen) == 3)
        assert seen == expected
        seen.clear()
