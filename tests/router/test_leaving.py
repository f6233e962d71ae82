"""B1, R5: engines feel soon that a client left, in every phase of its request, over loopback sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from schedloom.router.app import RouterApp
from tests.router.conftest import settings_for
from tests.router.fakes import EVENTS, Answer, FakeEngine, decoder, event_bytes, prefiller
from tests.router.sockets import asgi, served
from tests.router.waiting import PATIENCE_SECONDS, in_one_of

pytestmark = pytest.mark.anyio

TIMES = 30
WORD = {"choices": [{"index": 0, "text": "word", "finish_reason": None}]}
BODY = b'{"model":"m","prompt":"a","stream":true}'
ASK = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)


@asynccontextmanager
async def town(p: FakeEngine, d: FakeEngine) -> AsyncIterator[tuple[str, int]]:
    """The address of a router in front of them."""
    async with AsyncExitStack() as stack:
        for engine in (p, d):
            engine.origin = await stack.enter_async_context(served(asgi(engine)))
        app = RouterApp(settings_for([p, d]))
        await app.start()
        stack.push_async_callback(app.close)
        host, _, port = (await stack.enter_async_context(served(app))).removeprefix("http://").partition(":")
        yield host, int(port)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def leave_once(address: tuple[str, int], engine: FakeEngine) -> float:
    """Seconds from a client's hanging up until ``engine`` noticed."""
    asked, cancelled = len(engine.seen), engine.cancelled
    _, writer = await asyncio.open_connection(*address)
    writer.write(ASK)
    await asyncio.wait_for(until(lambda: len(engine.seen) > asked), PATIENCE_SECONDS)
    await asyncio.sleep(0.002)
    left = time.monotonic()
    writer.close()
    await asyncio.wait_for(until(lambda: engine.cancelled > cancelled), PATIENCE_SECONDS)
    return time.monotonic() - left


@pytest.mark.parametrize("phase", ["prefill", "stream"])
@in_one_of(5)
async def test_clients_that_leave_are_felt_within_50_ms(phase: str) -> None:
    """With the Decoder's answer begun, that is: until then it is kept from a Decoder that may not have the KV yet."""
    p, d, never = prefiller(), decoder(), asyncio.Event()
    engine = p if phase == "prefill" else d
    engine.always = Answer(200, EVENTS, [never] if phase == "prefill" else [event_bytes(WORD), never])
    async with town(p, d) as address:
        times = sorted([await leave_once(address, engine) for _ in range(TIMES)])
    assert times[TIMES * 9 // 10] < 0.05
