"""B3, R5, R6: push and layerwise over loopback sockets, with clients that hang up. The engines are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx2
import pytest

from schedloom.router.app import RouterApp
from schedloom.router.settings import router_settings
from tests.router.fakes import EVENTS, Answer, FakeEngine, Seen, decoder, event_bytes, prefiller
from tests.router.sockets import asgi, served
from tests.router.test_layerwise import ASKED, CONNECTOR
from tests.router.test_transfers import ENDPOINTS, PUSH
from tests.router.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio

WORD: Any = event_bytes({"choices": [{"index": 0, "text": "word", "finish_reason": None}]})
DONE: Any = event_bytes("[DONE]")
BODY = {"model": "m", "prompt": "a", "stream": True}


@asynccontextmanager
async def routed(p: FakeEngine, d: FakeEngine, **settings: Any) -> AsyncIterator[str]:
    """The address of a router in front of both; it ends with nothing under way."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(served(asgi(engine))) for engine in (p, d)]
        app = RouterApp(router_settings({"workers": [{"url": url} for url in urls]} | settings))
        await app.start()
        stack.push_async_callback(app.close)
        yield await stack.enter_async_context(served(app))
        await until(lambda: sum(worker.in_flight for worker in app.fleet.workers) == 0)


async def hang_up_when(address: str, condition: Any) -> None:
    async with httpx2.AsyncClient(timeout=PATIENCE_SECONDS) as client:
        request = asyncio.ensure_future(client.post(f"{address}/v1/completions", json=BODY))
        await until(condition)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


class Pushing:
    """The Prefiller accepts at once and is done when it may; the Decoder begins when the Prefiller is done."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.p = prefiller(kv_endpoints=ENDPOINTS[:1], **PUSH)
        self.d = decoder(features=[], **PUSH)
        self.p.script = [Answer(200, EVENTS, [WORD, self.may, DONE])]
        self.d.script = [Answer(200, EVENTS, [self.may, WORD, asyncio.Event(), DONE])]


async def test_pushed_answers_arrive() -> None:
    pair = Pushing()
    pair.d.script = [Answer(200, EVENTS, [pair.may, WORD, DONE])]
    async with routed(pair.p, pair.d) as address, httpx2.AsyncClient(timeout=PATIENCE_SECONDS) as client:
        asyncio.get_running_loop().call_later(0.05, pair.may.set)
        received = await client.post(f"{address}/v1/completions", json=BODY)
    assert (received.status_code, received.headers["x-schedloom-decision"]) == (200, "pd")
    assert received.content == WORD + DONE
    assert (pair.p.cancelled, pair.d.cancelled) == (0, 0)


async def test_hanging_up_while_the_decoder_waits_stops_neither_until_the_kv_is_there() -> None:
    pair = Pushing()
    async with routed(pair.p, pair.d, handoff_settle_seconds=0.05) as address:
        await hang_up_when(address, lambda: pair.d.seen)
        await asyncio.sleep(0.2)
        assert (pair.p.cancelled, pair.d.cancelled) == (0, 0)
        pair.may.set()
        await until(lambda: pair.d.cancelled == 1)
    assert pair.p.cancelled == 0


async def test_hanging_up_before_the_prefiller_accepts_stops_it_and_asks_no_decoder() -> None:
    pair = Pushing()

    async def never(seen: Seen) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError

    pair.p.script = [never]
    async with routed(pair.p, pair.d) as address:
        await hang_up_when(address, lambda: pair.p.seen)
        await until(lambda: pair.p.cancelled == 1)
    assert pair.d.seen == []


async def test_a_decoder_whose_prefiller_fails_twice_is_left_at_once() -> None:
    pair = Pushing()
    late = event_bytes({"error": {"message": "late", "code": 500}})
    pair.p.script = [Answer(200, EVENTS, [late, DONE])] * 2
    async with routed(pair.p, pair.d) as address, httpx2.AsyncClient(timeout=PATIENCE_SECONDS) as client:
        received = await client.post(f"{address}/v1/completions", json=BODY)
        assert (received.status_code, received.json()["error"]["code"]) == (502, "prefill_failed")
        await until(lambda: pair.d.cancelled == 1)
    assert (len(pair.p.seen), len(pair.d.seen)) == (2, 1)


async def test_a_decoder_asks_over_its_own_connection() -> None:
    p, d = prefiller(**CONNECTOR), decoder(**CONNECTOR)
    asked: list[int] = []

    async def decode(seen: Seen) -> Answer:
        body = ASKED | {"request_id": f"cmpl-{seen.headers['x-request-id']}-0"}
        async with httpx2.AsyncClient(timeout=PATIENCE_SECONDS) as client:
            answer = await client.post(seen.body["kv_transfer_params"]["metaserver"], json=body)
        asked.append(answer.status_code)
        return Answer(200, EVENTS, [WORD, DONE])

    d.script = [decode]
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(served(asgi(engine))) for engine in (p, d)]
        front = Front()
        address = await stack.enter_async_context(served(front))
        front.app = RouterApp(router_settings({"workers": [{"url": url} for url in urls], "callback_url": address}))
        await front.app.start()
        stack.push_async_callback(front.app.close)
        async with httpx2.AsyncClient(timeout=PATIENCE_SECONDS) as client:
            received = await client.post(f"{address}/v1/completions", json=BODY)
    assert (received.content, asked) == (WORD + DONE, [200])
    assert p.seen[0].body["kv_transfer_params"]["remote_host"] == ASKED["remote_host"]


class Front:
    """An address that is known before the router is there."""

    app: RouterApp

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)
