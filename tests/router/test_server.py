"""The HTTP/1.1 server: how requests and answers may be framed, and clients that read slowly (R8, SEC-7, SEC-8)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from schedloom.router.http.clients import Limits
from schedloom.router.http.line import line_of
from tests.router.sockets import served
from tests.router.waiting import PATIENCE_SECONDS, in_one_of, until

pytestmark = pytest.mark.anyio

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def echo(scope: Any, receive: Callable[[], Any], send: Any) -> None:
    """Says what it was asked; in chunks where the path says so."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    said = b"%b %b %b %b" % (scope["method"].encode(), scope["path"].encode(), scope["query_string"], body)
    chunked = scope["path"] == "/chunked"
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [] if chunked else [(b"content-length", b"%d" % len(said))],
        }
    )
    await send({"type": "http.response.body", "body": said, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def connected(app: Any = echo, **limits: Any) -> AsyncIterator[Pair]:
    async with served(app, limits=Limits(**limits)) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        yield reader, writer
        writer.close()


async def asked(*parts: bytes, pause: float = 0.02, **limits: Any) -> bytes:
    """All that the server says until it closes the connection."""
    async with connected(**limits) as (reader, writer):
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause)
        return await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)


END = b"GET /end HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def test_an_answer_without_a_length_comes_in_chunks_and_the_connection_is_kept() -> None:
    said = await asked(b"GET /chunked HTTP/1.1\r\nhost: x\r\n\r\n", END)
    first, last = said.split(b"0\r\n\r\n")
    assert first.endswith(b"transfer-encoding: chunked\r\n\r\ne\r\nGET /chunked  \r\n")
    assert last.endswith(b"connection: close\r\n\r\nGET /end  ")


async def test_http_1_0_knows_no_chunks() -> None:
    said = await asked(b"GET /chunked HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
    assert b"chunked\r\n" not in said and said.endswith(b"connection: close\r\n\r\nGET /chunked  ")


async def test_an_answer_to_head_has_no_body() -> None:
    said = await asked(b"HEAD /a HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert b"content-length: 9\r\n" in said and said.endswith(b"\r\n\r\n")


async def test_an_answer_to_head_that_comes_in_pieces_has_no_body_either() -> None:
    async def in_pieces(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b"one", b"two", b""):
            await send({"type": "http.response.body", "body": piece, "more_body": bool(piece)})

    async with connected(in_pieces) as (reader, writer):
        writer.write(b"HEAD /a HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        said = await asyncio.wait_for(reader.read(), 5)
    assert said.endswith(b"\r\n\r\n") and said.count(b"\r\n\r\n") == 1


@pytest.mark.parametrize("target", [b"http://elsewhere:1/a%20b?c=d", b"/a%20b?c=d"])
async def test_targets_are_read_in_both_forms(target: bytes) -> None:
    said = await asked(b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % target)
    assert said.endswith(b"GET /a b c=d ")


async def test_a_target_that_is_none_is_refused() -> None:
    assert (await asked(b"GET http:// HTTP/1.1\r\nhost: x\r\n\r\n")).startswith(b"HTTP/1.1 400")


async def test_a_client_that_waits_to_be_told_to_go_on_is_told() -> None:
    head = b"POST /a HTTP/1.1\r\nhost: x\r\nconnection: close\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
    async with connected() as (reader, writer):
        writer.write(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ok")
        assert (await reader.read()).endswith(b"POST /a  ok")


async def test_whoever_has_begun_with_its_body_is_not_told_again() -> None:
    for first in (b"", b"o"):
        head = b"POST /a HTTP/1.1\r\nhost: x\r\nconnection: close\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n"
        async with connected() as (reader, writer):
            for part in (head + first, b"aaaa"[len(first) : -2], b"a", b"a"):
                writer.write(part)
                await asyncio.sleep(0.02)
            said = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
        assert said.count(b"100 Continue") == (not first)
        assert said.count(b"200 OK") == 1


UPGRADE = b"host: x\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: a\r\n"


@pytest.mark.parametrize("pause", [0.0, 0.02])
@pytest.mark.parametrize(
    ("framed", "body"), [(b"content-length: 2", b"ok"), (b"transfer-encoding: chunked", b"2\r\nok\r\n0\r\n\r\n")]
)
async def test_an_upgrade_is_not_made_and_its_request_is_answered(pause: float, framed: bytes, body: bytes) -> None:
    """As the client in Java's standard library asks for one, with its first request."""
    async with connected() as (reader, writer):
        for part in (b"POST /a?b HTTP/1.1\r\n", UPGRADE + framed + b"\r\n\r\n", body, END):
            writer.write(part)
            await asyncio.sleep(pause)
        said = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
    assert b"POST /a b ok" in said and said.endswith(b"GET /end  ")


async def test_many_upgrades_at_once_are_as_many_requests(caplog: pytest.LogCaptureFixture) -> None:
    one = b"GET /a HTTP/1.1\r\n" + UPGRADE + b"\r\n"
    assert (await asked(one * 250 + END)).count(b"GET /a  ") == 250
    assert (await asked(one * 500)).startswith(b"HTTP/1.1 400")
    assert not caplog.records


async def test_a_tunnel_is_not_made() -> None:
    for target in (b"elsewhere:80", b"/a"):
        assert (await asked(b"CONNECT %b HTTP/1.1\r\nhost: x\r\n\r\n" % target)).startswith(b"HTTP/1.1 400")


async def test_requests_that_come_at_once_are_answered_in_order() -> None:
    posts = [b"POST /%d HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n%d" % (n, n) for n in range(5)]
    said = await asked(b"".join(posts) + END)
    places = [said.index(b"POST /%d  %d" % (n, n)) for n in range(5)]
    assert places == sorted(places) and said.endswith(b"GET /end  ")


async def test_a_connection_that_is_idle_is_closed() -> None:
    said = await asked(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n", idle_seconds=0.1)
    assert said.endswith(b"GET /a  ")


@in_one_of(5)
async def test_the_time_of_a_body_does_not_run_while_another_answer_comes_first() -> None:
    go, seen = asyncio.Event(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        if scope["path"] == "/slow":
            await go.wait()
        await echo(scope, receive, send)

    async with connected(app, body_seconds=0.1) as (reader, writer):
        writer.write(
            b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\nPOST /next HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"
        )
        await asyncio.sleep(0.3)
        go.set()
        writer.write(b"ok")
        assert (await reader.readuntil(b"POST /next  ok")).count(b"HTTP/1.1 200") == 2
    assert seen == ["/slow", "/next"]


async def test_a_client_that_reads_slowly_holds_the_answer_back() -> None:
    written, stopped = 0, asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal written
        line = line_of(scope, receive, send)
        line.start(200, b"", framed=False)
        while written < 64:
            written += 1
            if not line.write(bytes(2**20)):
                stopped.set()
                await line.drained()
        line.end()

    async with connected(app) as (reader, writer):
        writer.write(END)
        await asyncio.wait_for(stopped.wait(), PATIENCE_SECONDS)
        assert written < 64
        assert (await reader.read()).count(bytes(2**20)) == 64


CHUNKED = b"POST /1 HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"


@pytest.mark.parametrize("pause", [0.0, 0.02])
async def test_trailers_are_no_headers_of_the_next_request(pause: float) -> None:
    """On a connection that a proxy shares, it is somebody else's."""
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["headers"])
        await echo(scope, receive, send)

    async with connected(app) as (reader, writer):
        writer.write(CHUNKED + b"x-session-id: evil\r\n\r\n")
        await asyncio.sleep(pause)
        writer.write(END)
        await reader.read()
    assert seen[1:] == [[(b"host", b"x"), (b"connection", b"close")]]


@pytest.mark.parametrize("begin", [CHUNKED, CHUNKED[:-3] + b"1;a=", CHUNKED[:-3] + b"1\r\na\r\n0\r\nx:"])
async def test_what_is_neither_head_nor_body_is_bounded_too(begin: bytes) -> None:
    async with connected(max_header_bytes=10_000) as (reader, writer):
        writer.write(begin)
        for _ in range(8):
            if writer.is_closing():
                break
            writer.write(b"a" * 2_000)
            await asyncio.sleep(0.01)
        assert (await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)).startswith(b"HTTP/1.1 431")


async def test_a_long_body_in_small_chunks_is_no_long_head() -> None:
    chunks = [b"2\r\nab\r\n" * 500] * 20
    head = CHUNKED.removesuffix(b"0\r\n").replace(b"host: x", b"host: x\r\nconnection: close")
    said = await asked(head, *chunks, b"0\r\n\r\n", pause=0.001, max_header_bytes=1_000)
    assert said.endswith(b"ab" * 10_000)


@in_one_of(5)
async def test_no_time_runs_between_a_body_in_chunks_and_its_answer() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(0.3)
        await echo(scope, receive, send)

    async with connected(app, header_seconds=0.1, body_seconds=0.1) as (reader, writer):
        writer.write(CHUNKED.removesuffix(b"0\r\n") + b"2\r\nok\r\n")
        await asyncio.sleep(0.02)
        writer.write(b"0\r\n\r\n")
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_SECONDS)).startswith(b"HTTP/1.1 200")


async def test_only_so_many_requests_may_come_at_once() -> None:
    never, served_ = asyncio.Event(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        served_.append(scope["path"])
        await never.wait()

    for many, refused in ((200, False), (2_000, True)):
        async with connected(app) as (reader, writer):
            writer.write(b"GET /first HTTP/1.1\r\n\r\n" + b"GET /more HTTP/1.1\r\n\r\n" * many)
            if refused:
                assert (await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)).startswith(b"HTTP/1.1 400")
            else:
                await until(lambda: served_)
                await asyncio.sleep(0.1)
    assert served_ == ["/first"] * 2


@in_one_of(5)
async def test_a_request_that_has_its_answer_gets_no_second_one() -> None:
    """A client that was told no, and never sends the body that it had announced."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})

    head = b"POST /a HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n"
    async with connected(app, body_seconds=0.1) as (reader, writer):
        writer.write(head)
        said = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
    assert said.startswith(b"HTTP/1.1 401") and said.endswith(b"\r\n\r\nno")
