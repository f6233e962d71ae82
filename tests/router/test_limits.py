"""Clients that send too much, too slowly, or what is not a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

import pytest

from schedloom.router.app import RouterApp
from schedloom.router.http.clients import Limits
from schedloom.router.serve import limits_of
from tests.router.conftest import settings_for
from tests.router.fakes import Answer, FakeUpstream, decoder, prefiller
from tests.router.sockets import served
from tests.router.waiting import PATIENCE_SECONDS, in_one_of, until

pytestmark = pytest.mark.anyio

UNHURRIED = Limits(header_seconds=PATIENCE_SECONDS, body_seconds=PATIENCE_SECONDS)
head_soon = pytest.mark.parametrize("limits", [UNHURRIED._replace(header_seconds=0.3)], ids=["head soon"])
body_soon = pytest.mark.parametrize("limits", [UNHURRIED._replace(body_seconds=0.3)], ids=["body soon"])
BODY = b'{"model":"m","prompt":"a"}'


@pytest.fixture
def limits() -> Limits:
    return UNHURRIED


@pytest.fixture
async def address(limits: Limits) -> AsyncIterator[tuple[str, int]]:
    async with AsyncExitStack() as stack:
        engines = [prefiller(), decoder()]
        settings = settings_for(engines, max_body_bytes=100_000)
        app = RouterApp(settings, FakeUpstream(engines))
        await app.start()
        stack.push_async_callback(app.close)
        host, port = (await stack.enter_async_context(served(app, limits=limits))).removeprefix("http://").split(":")
        yield host, int(port)


async def exchange(address: tuple[str, int], *parts: bytes, pause: float = 0.0) -> bytes:
    """All that the router says until it closes the connection."""
    reader, writer = await asyncio.open_connection(*address)
    said = asyncio.ensure_future(_listen(reader))
    try:
        for part in parts:
            if said.done() or writer.is_closing():
                break
            writer.write(part)
            await asyncio.sleep(pause)
        return await said
    finally:
        writer.close()


async def _listen(reader: asyncio.StreamReader) -> bytes:
    said = b""
    with suppress(ConnectionError):
        while part := await asyncio.wait_for(reader.read(65536), PATIENCE_SECONDS):
            said += part
    return said


def post(*headers: bytes, body: bytes = BODY, path: bytes = b"/v1/completions") -> bytes:
    lines = [b"POST %b HTTP/1.1" % path, b"host: x", *headers, b"content-length: %d" % len(body), b"", body]
    return b"\r\n".join(lines)


CLOSE = b"connection: close"


async def test_an_ordinary_request_is_served(address: tuple[str, int]) -> None:
    answer = await exchange(address, post(CLOSE))
    assert answer.startswith(b"HTTP/1.1 200") and b" word word word" in answer


async def test_a_request_in_single_bytes_is_served(address: tuple[str, int]) -> None:
    request = post(CLOSE)
    assert (await exchange(address, *[request[i : i + 1] for i in range(len(request))])).startswith(b"HTTP/1.1 200")


async def test_two_requests_on_one_connection_are_served(address: tuple[str, int]) -> None:
    answer = await exchange(address, post() + post(CLOSE))
    assert answer.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize("size", [70_000, 300_000, 2_000_000])
@pytest.mark.parametrize("many", [False, True])
async def test_long_headers_are_refused(address: tuple[str, int], size: int, many: bool) -> None:
    headers = [b"x-%d: %b" % (i, b"a" * 100) for i in range(size // 100)] if many else [b"x: " + b"a" * size]
    answer = await exchange(address, post(*headers))
    assert answer.startswith(b"HTTP/1.1 431") or answer == b""


async def test_headers_without_an_end_are_refused_before_their_time_is_over(address: tuple[str, int]) -> None:
    answer = await exchange(address, b"POST / HTTP/1.1\r\nx: ", b"a" * 100_000)
    assert answer.startswith(b"HTTP/1.1 431")


async def test_a_long_path_is_refused(address: tuple[str, int]) -> None:
    assert (await exchange(address, post(path=b"/" + b"a" * 70_000))).startswith(b"HTTP/1.1 431")


@head_soon
@pytest.mark.parametrize("parts", [[], [b"POST /v1/comp"], [post()[:40]], [post(CLOSE)[:-30]]])
async def test_a_head_that_does_not_come_is_refused(address: tuple[str, int], parts: list[bytes]) -> None:
    answer = await exchange(address, *parts)
    assert answer.startswith(b"HTTP/1.1 408")


@head_soon
async def test_a_head_that_trickles_is_refused(address: tuple[str, int]) -> None:
    request = post()
    answer = await exchange(address, *[request[i : i + 1] for i in range(20)], pause=0.05)
    assert answer.startswith(b"HTTP/1.1 408")


@head_soon
@in_one_of(5)
async def test_a_second_head_that_does_not_come_is_refused(address: tuple[str, int]) -> None:
    answer = await exchange(address, post(), b"POST /v1/comp", pause=0.1)
    assert answer.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in answer


@body_soon
async def test_a_body_that_does_not_come_is_refused(address: tuple[str, int]) -> None:
    for sent in (b"", BODY[:-1]):
        request = post(CLOSE).removesuffix(BODY) + sent
        answer = await exchange(address, request)
        assert answer.startswith(b"HTTP/1.1 408") and b"body_too_slow" in answer


async def test_a_body_that_is_too_long_is_refused(address: tuple[str, int]) -> None:
    body = b'{"model":"m","prompt":"%b"}' % (b"a" * 200_000)
    assert (await exchange(address, post(CLOSE, body=body))).startswith(b"HTTP/1.1 413")
    chunked = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = [b"%x\r\n%b\r\n" % (30_000, b"a" * 30_000)] * 5
    assert b"HTTP/1.1 413" in await exchange(address, chunked, *chunks)


async def test_a_body_that_is_to_be_too_long_is_not_asked_for(address: tuple[str, int]) -> None:
    head = post(b"expect: 100-continue", CLOSE, body=b"a" * 100_001).removesuffix(b"a" * 100_001)
    assert (await exchange(address, head)).startswith(b"HTTP/1.1 413")
    fits = post(b"expect: 100-continue", CLOSE).removesuffix(BODY)
    assert (await exchange(address, fits, BODY, pause=0.1)).startswith(b"HTTP/1.1 100")


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 26\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 26\r\ncontent-length: 27\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: nonsense\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost : x\r\ncontent-length: 26\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n folded\r\ncontent-length: 26\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\nhost: x\ncontent-length: 26\n\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
)
async def test_what_two_servers_could_read_differently_is_refused(address: tuple[str, int], head: bytes) -> None:
    answer = await exchange(address, head + BODY)
    assert answer.startswith(b"HTTP/1.1 400") and b'"code":"invalid_http"' in answer


async def test_a_full_router_refuses_before_it_reads_and_goes_on_when_there_is_room() -> None:
    """Engines that call back and whoever looks at a page are heard all the same."""
    engines, go = [prefiller(), decoder()], asyncio.Event()
    engines[0].script = [Answer(200, steps=[go])]
    settings = settings_for(engines, max_in_flight=1, max_waiting=0)
    app = RouterApp(settings, FakeUpstream(engines))
    await app.start()
    async with served(app, limits=limits_of(settings, app)) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        address = (host, int(port))
        first = asyncio.create_task(exchange(address, post(CLOSE)))
        await until(lambda: app.door.gate.inside)
        refused = await exchange(address, post(body=b"{"), post(CLOSE, body=b"{"))
        assert refused.count(b"HTTP/1.1 503 Service Unavailable") == refused.count(b"retry-after: 1") == 2
        assert refused.count(b'"code":"overloaded"') == 2
        messages = await exchange(address, post(path=b"/v1/messages"), post(CLOSE))
        assert messages.count(b"HTTP/1.1 503 Service Unavailable") == messages.count(b"retry-after: 1") == 2
        assert messages.count(b'{"type":"error","error":{"type":"api_error"') == 1
        assert messages.count(b'"code":"overloaded"') == 1
        assert min([await seconds_to_a_refusal(address) for _ in range(10)]) < 0.01
        assert (await exchange(address, post(CLOSE, path=b"/v1/metaserver?x"))).startswith(b"HTTP/1.1 404")
        assert (await exchange(address, b"GET /ready HTTP/1.1\r\n" + CLOSE + b"\r\nhost: x\r\n\r\n")).startswith(
            b"HTTP/1.1 200"
        )
        go.set()
        await first
        assert (await exchange(address, post(CLOSE))).startswith(b"HTTP/1.1 200")
    labels = {"route": "none", "outcome": "shed"}
    assert (app.metrics.registry.get_sample_value("schedloom_router_requests_total", labels) or 0) >= 2
    await app.close()


async def seconds_to_a_refusal(address: tuple[str, int]) -> float:
    """The median of some."""
    reader, writer = await asyncio.open_connection(*address)
    seconds = []
    for _ in range(21):
        asked = time.monotonic()
        writer.write(post(body=b"{"))
        await reader.readuntil(b'"overloaded"}}')
        seconds.append(time.monotonic() - asked)
    writer.close()
    return sorted(seconds)[10]


@pytest.mark.parametrize("host", [b"x/e?", b"evil@x", b"", b"x#/v1/models"])
async def test_the_host_header_decides_nothing(address: tuple[str, int], host: bytes) -> None:
    request = post(CLOSE, path=b"/pause").replace(b"host: x", b"host: " + host)
    assert (await exchange(address, request)).startswith(b"HTTP/1.1 404")
