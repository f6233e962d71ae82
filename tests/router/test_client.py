"""The HTTP client against servers that behave in every way that servers do."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from schedloom.router.http import client, upstream_exchange
from schedloom.router.http.client import HttpUpstream
from schedloom.router.http.upstream import (
    BrokenOff,
    ConnectFailed,
    TimedOut,
    Timeouts,
    TooLate,
    UpstreamRequest,
    header,
)
from schedloom.router.serve import listen
from tests.router.sockets import raw_server
from tests.router.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Kind: fine\r\n\r\nok"


@pytest.fixture
async def upstream() -> AsyncIterator[HttpUpstream]:
    made = HttpUpstream(connect_timeout=PATIENCE_SECONDS)
    yield made
    await made.close()


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is given up for having lasted long, on whatever machine."""
    monkeypatch.setattr(client, "_HANDOFF_IDLE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(upstream_exchange, "_LISTEN_SECONDS", 2 * PATIENCE_SECONDS)


class Server:
    """Writes ``answers`` one after the other, each in the given parts, and notes what it was asked."""

    def __init__(self, *answers: list[bytes] | bytes, close_after: bool = False) -> None:
        self.answers = [answer if isinstance(answer, list) else [answer] for answer in answers]
        self.asked: list[bytes] = []
        self.connections = 0
        self.lost = asyncio.Event()
        self.close_after = close_after

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                self.asked.append(head + await reader.readexactly(size))
                for part in self.answers.pop(0):
                    writer.write(part)
                    await asyncio.sleep(0.005)
                if self.close_after:
                    break
        except (asyncio.IncompleteReadError, ConnectionResetError):
            self.lost.set()
        except IndexError:
            await reader.read()
            self.lost.set()
        writer.close()


def post(origin: str, **more: object) -> UpstreamRequest:
    request = UpstreamRequest(origin, "POST", "/x", (b"a: b\r\n",), b"body")
    for name, value in more.items():
        setattr(request, name, value)
    return request


async def ask(upstream: HttpUpstream, origin: str, **more: object) -> bytes:
    response = await upstream.send(post(origin, **more))
    try:
        return await response.read_all()
    finally:
        response.close()


async def test_a_request_is_written_as_http_says(upstream: HttpUpstream) -> None:
    server = Server(OK)
    async with raw_server(server) as origin:
        response = await upstream.send(post(origin + "/prefix"))
        assert (response.status, header(response.headers, b"x-kind")) == (200, b"fine")
        assert await response.read_all() == b"ok"
    host = origin.removeprefix("http://").encode()
    expected = b"POST /prefix/x HTTP/1.1\r\nhost: %b\r\na: b\r\ncontent-length: 4\r\n\r\nbody" % host
    assert server.asked == [expected]


async def test_connections_are_kept_and_shared_out_one_request_at_a_time(upstream: HttpUpstream) -> None:
    server = Server(*[OK] * 5)
    async with raw_server(server) as origin:
        for _ in range(3):
            assert await ask(upstream, origin) == b"ok"
        assert server.connections == 1
        await asyncio.gather(ask(upstream, origin), ask(upstream, origin))
        assert server.connections == 2


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
BODY_AT = CHUNKED.index(b"3\r\n")


@pytest.mark.parametrize("cut", range(1, len(CHUNKED), 3))
async def test_answers_may_arrive_in_any_pieces(upstream: HttpUpstream, cut: int) -> None:
    server = Server([CHUNKED[:cut], CHUNKED[cut:]], OK)
    async with raw_server(server) as origin:
        assert await ask(upstream, origin) == b"onetwo"
        assert await ask(upstream, origin) == b"ok"
        assert server.connections == 1


async def test_pieces_are_counted_as_the_engine_framed_them(upstream: HttpUpstream) -> None:
    framed = [b"3\r\none\r\n3\r\ntwo\r\n", b"5\r\nthree\r\n0\r\n\r\n"]
    async with raw_server(Server([CHUNKED[:BODY_AT], *framed])) as origin:
        response = await upstream.send(post(origin))
        assert (response.pieces, await response.read(), response.pieces) == (0, b"onetwo", 2)
        assert (await response.read(), response.pieces) == (b"three", 3)
        assert (await response.read(), response.pieces) == (b"", 3)


async def test_what_arrived_together_is_read_together(upstream: HttpUpstream) -> None:
    async with raw_server(Server(CHUNKED)) as origin:
        response = await upstream.send(post(origin))
        assert await response.read() == b"onetwo"
        assert await response.read() == b""


async def test_an_answer_may_end_with_its_connection(upstream: HttpUpstream) -> None:
    async with raw_server(Server(b"HTTP/1.1 200 OK\r\n\r\nall of it", close_after=True)) as origin:
        assert await ask(upstream, origin) == b"all of it"


async def test_a_connection_that_the_server_closes_is_not_kept(upstream: HttpUpstream) -> None:
    closing = OK.replace(b"X-Kind", b"Connection: close\r\nX-Kind")
    server = Server(closing, OK)
    async with raw_server(server) as origin:
        assert await ask(upstream, origin) == b"ok"
        assert await ask(upstream, origin) == b"ok"
        assert server.connections == 2


async def test_interim_answers_are_passed_over(upstream: HttpUpstream) -> None:
    async with raw_server(Server([b"HTTP/1.1 100 Continue\r\n\r\n", OK], OK)) as origin:
        assert await ask(upstream, origin) == b"ok"
        assert await ask(upstream, origin) == b"ok"


@pytest.mark.parametrize(
    "part",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok",
        CHUNKED[: BODY_AT + 4],
        CHUNKED[: BODY_AT + 12],
        CHUNKED[:-3],
    ],
)
async def test_an_answer_cut_short_is_never_taken_for_whole(upstream: HttpUpstream, part: bytes) -> None:
    async with raw_server(Server(part, close_after=True)) as origin:
        with pytest.raises(BrokenOff):
            await ask(upstream, origin)


SMUGGLED = [b"a\rx-evil: 1", b"a\nx-evil: 1", b"a\0b", b"a\r\n folded", b"a\r\nContent-Length: 2"]


@pytest.mark.parametrize(
    "nonsense",
    [
        b"SMTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        *[b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: 2\r\n\r\nok" % value for value in SMUGGLED],
    ],
)
async def test_what_is_not_http_is_refused(upstream: HttpUpstream, nonsense: bytes) -> None:
    async with raw_server(Server(nonsense)) as origin:
        with pytest.raises(BrokenOff, match="not HTTP"):
            await ask(upstream, origin)


async def test_a_kept_connection_that_died_is_replaced_once(upstream: HttpUpstream) -> None:
    """The server takes the second request and closes without a byte of answer, once or twice."""
    for deaths, survives in ((1, True), (2, False)):
        asked = 0

        async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deaths: int = deaths) -> None:
            nonlocal asked
            while not reader.at_eof():
                await reader.readuntil(b"body")
                asked += 1
                if 2 <= asked <= 1 + deaths:
                    break
                writer.write(OK)
            writer.close()

        async with raw_server(server) as origin:
            assert await ask(upstream, origin) == b"ok"
            if survives:
                assert await ask(upstream, origin) == b"ok"
            else:
                with pytest.raises(BrokenOff):
                    await ask(upstream, origin)
            assert asked == 3


async def test_a_fresh_connection_that_dies_is_not_replaced(upstream: HttpUpstream) -> None:
    server = Server([], close_after=True)
    async with raw_server(server) as origin:
        with pytest.raises(BrokenOff):
            await ask(upstream, origin)
    assert server.connections == 1


async def test_a_kept_connection_that_died_in_mid_answer_is_not_replaced(upstream: HttpUpstream) -> None:
    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"body")
        writer.write(OK)
        await reader.readuntil(b"body")
        writer.write(CHUNKED[:BODY_AT])
        await writer.drain()
        writer.close()

    async with raw_server(server) as origin:
        assert await ask(upstream, origin) == b"ok"
        with pytest.raises(BrokenOff):
            await ask(upstream, origin)


async def test_nobody_there_is_told_at_once(upstream: HttpUpstream) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectFailed):
            await ask(upstream, f"http://127.0.0.1:{unused.getsockname()[1]}")


async def hang_up(listener: socket.socket) -> None:
    """On whoever calls, at once."""
    loop = asyncio.get_running_loop()
    while True:
        (await loop.sock_accept(listener))[0].close()


@pytest.mark.parametrize("others", [0, 7])
async def test_an_engine_that_closes_what_it_just_accepted_is_told_at_once(upstream: HttpUpstream, others: int) -> None:
    listener = listen("127.0.0.1", 0)
    closing = asyncio.create_task(hang_up(listener))
    origin = f"http://127.0.0.1:{listener.getsockname()[1]}"
    for _ in range(5):
        asked = [asyncio.wait_for(ask(upstream, origin), PATIENCE_SECONDS / 2) for _ in range(1 + others)]
        ends = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(end) for end in ends} <= {ConnectFailed, BrokenOff}
    closing.cancel()
    listener.close()


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("unasked", [OK, b"H", b"HTTP/1.1 200 OK\r\nX-Of: another\r\nX-Rest: "])
async def test_what_was_not_asked_for_is_no_answer_to_the_next_request(
    upstream: HttpUpstream, unasked: bytes, at_once: bool
) -> None:
    server = Server([OK + unasked] if at_once else [OK, unasked], OK, OK)
    async with raw_server(server) as origin:
        assert await ask(upstream, origin) == b"ok"
        await until(lambda: not upstream._open)
        response = await upstream.send(post(origin))
        assert header(response.headers, b"x-of") is None
        assert await response.read_all() == b"ok"
        response.close()
    assert server.connections == 2


async def test_no_protocol_is_switched_to(upstream: HttpUpstream) -> None:
    switching = b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    async with raw_server(Server(switching)) as origin:
        with pytest.raises(BrokenOff, match="not HTTP"):
            await ask(upstream, origin)


async def test_silence_before_and_within_an_answer_ends(upstream: HttpUpstream) -> None:
    for parts, first_byte, silence in (([], 0.1, 60), ([CHUNKED[:BODY_AT]], 60, 0.1)):
        server = Server(parts)
        async with raw_server(server) as origin:
            with pytest.raises(TimedOut):
                await ask(upstream, origin, timeouts=Timeouts(first_byte, silence))
            await asyncio.wait_for(server.lost.wait(), PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("begin", "part", "end"),
    [
        (b"", b"HTTP/1.1 102 Processing\r\n\r\n", OK),
        (b"HTTP/1.1 200 OK\r\n", b"x", b": y\r\nContent-Length: 2\r\n\r\nok"),
    ],
    ids=["102s", "a head in pieces"],
)
async def test_what_is_no_answer_yet_wins_no_time(
    upstream: HttpUpstream, begin: bytes, part: bytes, end: bytes
) -> None:
    async with raw_server(Server([begin, *[part] * 200, end])) as origin:
        with pytest.raises(TimedOut):
            await ask(upstream, origin, timeouts=Timeouts(0.2, PATIENCE_SECONDS))


async def test_a_long_prefill_is_not_a_silent_engine(upstream: HttpUpstream) -> None:
    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"body")
        await asyncio.sleep(0.3)
        writer.write(OK)

    async with raw_server(server) as origin:
        assert await ask(upstream, origin, timeouts=Timeouts(PATIENCE_SECONDS, 0.05)) == b"ok"


async def test_a_slow_reader_is_not_a_silent_engine(upstream: HttpUpstream) -> None:
    async with raw_server(Server([CHUNKED[: BODY_AT + 8]])) as origin:
        response = await upstream.send(post(origin, timeouts=Timeouts(silence=0.1)))
        await asyncio.sleep(0.3)
        assert await response.read() == b"one"
        with pytest.raises(TimedOut):
            await response.read()
        response.close()


@pytest.mark.parametrize("late_by", [0.0, 1.0])
async def test_nothing_is_dispatched_after_its_time(upstream: HttpUpstream, late_by: float) -> None:
    server = Server(OK, OK)
    async with raw_server(server) as origin:
        for _ in range(2):
            with pytest.raises(TooLate):
                await ask(upstream, origin, dispatch_by=asyncio.get_running_loop().time() - late_by)
        assert await ask(upstream, origin, dispatch_by=asyncio.get_running_loop().time() + PATIENCE_SECONDS) == b"ok"
        with pytest.raises(TooLate):
            await ask(upstream, origin, dispatch_by=asyncio.get_running_loop().time() - late_by)
    assert len(server.asked) == 1


@pytest.mark.parametrize("parts", [[], [CHUNKED[: BODY_AT + 8]]])
async def test_cancelling_closes_the_connection(upstream: HttpUpstream, parts: list[bytes]) -> None:
    server = Server(parts)
    async with raw_server(server) as origin:
        task = asyncio.create_task(ask(upstream, origin))
        await until(lambda: server.asked)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait_for(server.lost.wait(), PATIENCE_SECONDS)
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_reader_that_lags_holds_the_engine_back(upstream: HttpUpstream) -> None:
    size = 64 * 2**20
    written = 0

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"body")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        while written < size:
            writer.write(bytes(2**20))
            written += 2**20
            await writer.drain()
        writer.close()

    async with raw_server(server) as origin:
        response = await upstream.send(post(origin))
        await asyncio.sleep(0.3)
        assert written < size / 2
        read = 0
        while chunk := await response.read():
            read += len(chunk)
        assert read == size


async def test_small_writes_are_not_delayed(upstream: HttpUpstream) -> None:
    async with raw_server(Server(OK)) as origin:
        await ask(upstream, origin)
        (connection,) = upstream._open
        tcp = connection.transport.get_extra_info("socket")
        assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_closing_leaves_no_connection_open() -> None:
    upstream = HttpUpstream()
    server = Server(OK)
    async with raw_server(server) as origin:
        await ask(upstream, origin)
        await upstream.close()
        await asyncio.wait_for(server.lost.wait(), PATIENCE_SECONDS)
    assert not upstream._open


@pytest.mark.parametrize(
    ("parts", "heard"), [([], []), ([CHUNKED[:BODY_AT]], [b""]), ([CHUNKED[: BODY_AT + 8]], [b"", b"one"])]
)
@pytest.mark.parametrize("settle_seconds", [0.1, 2 * PATIENCE_SECONDS])
async def test_a_hand_over_settles_before_its_connection_closes(
    upstream: HttpUpstream, parts: list[bytes], heard: list[bytes], settle_seconds: float
) -> None:
    server, said = Server(parts), []
    async with raw_server(server) as origin:

        async def hand_over() -> None:
            response = await upstream.send(post(origin, settle_seconds=settle_seconds))
            said.append(b"")
            try:
                while True:
                    said.append(await response.read())
            finally:
                response.close()

        task = asyncio.create_task(hand_over())
        await until(lambda: server.asked and said == heard)
        task.cancel()
        if b"one" in heard or settle_seconds < PATIENCE_SECONDS:
            await asyncio.wait_for(server.lost.wait(), PATIENCE_SECONDS)
        else:
            await asyncio.sleep(0.1)
            assert not server.lost.is_set()


async def test_a_settling_hand_over_closes_once_its_answer_begins(upstream: HttpUpstream) -> None:
    asked, begin, lost = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"body")
        asked.set()
        await begin.wait()
        writer.write(CHUNKED[: BODY_AT + 8])
        await reader.read()
        lost.set()

    async with raw_server(server) as origin:
        request = post(origin, settle_seconds=2 * PATIENCE_SECONDS)
        task = asyncio.create_task(upstream.send(request))
        await asked.wait()
        task.cancel()
        await asyncio.sleep(0.05)
        assert not lost.is_set()
        begin.set()
        await asyncio.wait_for(lost.wait(), PATIENCE_SECONDS)


async def test_a_hand_over_is_made_even_when_cancelled_before_it_is_connected(upstream: HttpUpstream) -> None:
    server = Server(OK)
    async with raw_server(server) as origin:
        for settle in (0.0, PATIENCE_SECONDS):
            task = asyncio.create_task(upstream.send(post(origin, settle_seconds=settle)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            if settle:
                await until(lambda: server.asked)
            else:
                await asyncio.sleep(0.1)
                assert not server.asked


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("sent_before_leaving", [True, False])
async def test_an_answer_given_before_the_engine_noticed_is_still_heard(
    upstream: HttpUpstream, sent_before_leaving: bool
) -> None:
    """The engine answers when it is told that its client left: it had finished already."""
    heard: list[tuple[int, bytes]] = []
    asked = asyncio.Event()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"body")
        asked.set()
        if not sent_before_leaving:
            assert await reader.read() == b""
        writer.write(OK)

    async with raw_server(server) as origin:
        listening = post(origin, on_late_answer=lambda status, body: heard.append((status, body)))
        task = asyncio.create_task(upstream.send(listening))
        await asked.wait()
        task.cancel()
        await until(lambda: heard)
    assert heard == [(200, b"ok")]


@pytest.mark.usefixtures("unhurried")
async def test_a_connection_on_which_goodbye_was_said_is_not_used_again(upstream: HttpUpstream) -> None:
    """Although its engine would keep it, and nobody could write to it."""
    connections, asked, never = 0, asyncio.Event(), asyncio.Event()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"body")
        asked.set()
        if connections == 1:
            assert await reader.read() == b""
        writer.write(OK)
        await never.wait()

    heard: list[object] = []
    async with raw_server(server) as origin:
        task = asyncio.create_task(upstream.send(post(origin, on_late_answer=lambda *said: heard.append(said))))
        await asked.wait()
        task.cancel()
        await until(lambda: heard)
        assert heard == [(200, b"ok")]
        assert await ask(upstream, origin) == b"ok"
    assert connections == 2


@pytest.mark.usefixtures("unhurried")
async def test_an_engine_that_had_not_finished_is_cancelled_at_once(upstream: HttpUpstream) -> None:
    heard: list[object] = []
    server = Server([])
    async with raw_server(server) as origin:
        listening = post(origin, on_late_answer=lambda *said: heard.append(said))
        task = asyncio.create_task(upstream.send(listening))
        await until(lambda: server.asked)
        task.cancel()
        await asyncio.wait_for(server.lost.wait(), PATIENCE_SECONDS)
    assert heard == []


async def test_an_answer_that_was_read_is_not_late(upstream: HttpUpstream) -> None:
    heard: list[object] = []
    async with raw_server(Server(CHUNKED, OK)) as origin:
        for _ in range(2):
            request = post(origin, on_late_answer=lambda *said: heard.append(said))
            response = await upstream.send(request)
            await response.read_all()
            response.close()
    assert heard == []


@pytest.mark.usefixtures("unhurried")
async def test_a_hand_over_that_an_engine_took_is_never_sent_twice(upstream: HttpUpstream) -> None:
    asked = 0

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await reader.readuntil(b"body")
        writer.write(OK)
        await reader.readuntil(b"body")
        asked += 1
        writer.close()

    async with raw_server(server) as origin:
        assert await ask(upstream, origin) == b"ok"
        with pytest.raises(BrokenOff):
            await ask(upstream, origin, dispatch_by=asyncio.get_running_loop().time() + PATIENCE_SECONDS)
        await asyncio.sleep(0.05)
    assert asked == 1


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate of its own for 127.0.0.1, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
    files = ["-keyout", str(path), "-out", f"{path}.crt"]
    subprocess.run([*made.split(), *files, "-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1"], check=True)
    path.write_bytes(path.read_bytes() + Path(f"{path}.crt").read_bytes())
    return path


@pytest.mark.usefixtures("unhurried")
async def test_a_prefill_over_tls_is_cancelled_too(
    upstream: HttpUpstream, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS cannot say goodbye on one side and go on listening: the connection ends."""
    gone, asked = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"body")
        asked.set()
        with suppress(OSError):
            await reader.read()
        gone.set()
        writer.close()

    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(certificate)
    ours = ssl.create_default_context(cafile=f"{certificate}.crt")
    monkeypatch.setattr("schedloom.router.http.client._tls_context", lambda: ours)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=theirs)
    origin = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    request = post(origin, on_late_answer=lambda *said: None)
    sending = asyncio.ensure_future(upstream.send(request))
    await asked.wait()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await asyncio.wait_for(gone.wait(), PATIENCE_SECONDS)
    server.close()
