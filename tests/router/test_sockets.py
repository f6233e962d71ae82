"""The whole router over loopback sockets, in front of fake engines, with clients of the field."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import APIError, APIStatusError, AsyncOpenAI

from schedloom.core.errors import ConfigurationError
from schedloom.core.wire import Role
from schedloom.router import serve as serving
from schedloom.router.app import RouterApp
from schedloom.router.serve import listen, run
from schedloom.router.settings import RouterSettings, router_settings
from tests.router.fakes import BROKEN, EVENTS, Answer, FakeEngine, contract, decoder, event_bytes, prefiller
from tests.router.sockets import asgi, refuses, router_process, served
from tests.router.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio

WORD = {"choices": [{"index": 0, "text": "word", "finish_reason": None}]}
FINISH = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
STREAM = {"model": "m", "prompt": "a", "stream": True}
MESSAGES: Any = [{"role": "user", "content": "hello"}]


class Town:
    """A Prefiller, two Decoders and a router, each at an address of its own."""

    def __init__(self, app: RouterApp, address: str, p: FakeEngine, decoders: list[FakeEngine]) -> None:
        self.app = app
        self.address = address
        self.p = p
        self.decoders = decoders

    @property
    def in_flight(self) -> int:
        return sum(worker.in_flight for worker in self.app.fleet.workers)


@pytest.fixture
async def town() -> AsyncIterator[Town]:
    async with AsyncExitStack() as stack:
        p, decoders = prefiller(), [decoder(0), decoder(1)]
        urls = [await stack.enter_async_context(served(asgi(engine))) for engine in (p, *decoders)]
        policies = [{"name": "session_owner", "max_lead": 100}]
        settings = router_settings({"workers": [{"url": url} for url in urls], "policies": policies})
        app = RouterApp(settings)
        await app.start()
        stack.push_async_callback(app.close)
        yield Town(app, await stack.enter_async_context(served(app)), p, decoders)
    assert sum(worker.in_flight for worker in app.fleet.workers) == 0


@pytest.fixture
async def openai(town: Town) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{town.address}/v1", api_key="none", max_retries=0) as client:
        yield client


async def streamed(client: AsyncOpenAI, session: str) -> tuple[str, Any, list[Any]]:
    stream = await client.chat.completions.create(
        model="fake-model",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"X-Session-ID": session},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    return text, stream.response.headers, chunks


async def test_the_openai_client_sees_ordinary_answers(town: Town, openai: AsyncOpenAI) -> None:
    assert [model.id async for model in openai.models.list()] == ["fake-model"]
    decisions = []
    for turn in range(4):
        for engine in town.decoders:
            engine.holds = turn != 2
        text, headers, chunks = await streamed(openai, "s")
        assert text == " word word word"
        assert len({chunk.id for chunk in chunks}) == 1
        assert sum(choice.delta.role is not None for chunk in chunks for choice in chunk.choices) == 1
        assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [3]
        assert headers["content-type"].startswith("text/event-stream")
        decisions.append(headers["x-schedloom-decision"])
    assert decisions == ["pd", "append", "fallback", "append"]


async def test_the_openai_client_without_streaming_and_by_conversation_id(town: Town, openai: AsyncOpenAI) -> None:
    for expected in ("pd", "append"):
        raw = await openai.chat.completions.with_raw_response.create(
            model="fake-model", messages=MESSAGES, extra_body={"conversation_id": "c"}
        )
        answer = raw.parse()
        assert raw.headers["x-schedloom-decision"] == expected
        assert answer.choices[0].message.content == " word word word"
        assert answer.usage is not None and answer.usage.completion_tokens == 3
    text = (await openai.completions.create(model="fake-model", prompt="hi")).choices[0].text
    assert text == " word word word"


async def test_the_openai_client_sees_errors(town: Town, openai: AsyncOpenAI) -> None:
    town.p.script = [Answer.error(400, "too many tokens")]
    with pytest.raises(APIStatusError, match="too many tokens") as refused:
        await openai.completions.create(model="fake-model", prompt="hi")
    assert refused.value.status_code == 400
    word = {"choices": [{"index": 0, "text": "word", "finish_reason": None}]}
    for engine in town.decoders:
        engine.script = [Answer(200, EVENTS, [event_bytes(word), BROKEN])]
    with pytest.raises(APIError, match="broke off"):
        async for _ in await openai.completions.create(model="fake-model", prompt="hi", stream=True):
            pass


async def test_many_clients_at_once(town: Town) -> None:
    limits = httpx2.Limits(max_connections=100)
    async with httpx2.AsyncClient(base_url=town.address, limits=limits, timeout=PATIENCE_SECONDS) as client:

        async def session(number: int) -> list[str]:
            decisions = []
            for turn in range(3):
                body = {"model": "fake-model", "messages": MESSAGES, "stream": bool(turn % 2)}
                headers = {"X-Session-ID": str(number)}
                response = await client.post("/v1/chat/completions", json=body, headers=headers)
                assert response.status_code == 200 and " word" in response.text
                decisions.append(response.headers["x-schedloom-decision"])
            return decisions

        assert await asyncio.gather(*map(session, range(60))) == [["pd", "append", "append"]] * 60
    assert abs(len(town.decoders[0].seen) - len(town.decoders[1].seen)) <= 30


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_client_that_hangs_up_is_felt_by_the_engine(town: Town, phase: str) -> None:
    never = asyncio.Event()
    word = {"choices": [{"index": 0, "text": "word", "finish_reason": None}]}
    engines = [town.p] if phase == "prefill" else town.decoders
    for engine in engines:
        engine.script = [Answer(200, EVENTS, [never] if phase == "prefill" else [event_bytes(word), never])]
    host, port = town.address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"model":"m","prompt":"a","stream":true}'
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    await (until(lambda: town.p.seen) if phase == "prefill" else reader.readuntil(b"word"))
    assert town.in_flight == 1
    writer.close()
    await until(lambda: not town.in_flight and any(engine.cancelled for engine in engines))
    assert sum(engine.cancelled for engine in engines) == 1
    await writer.wait_closed()


async def test_events_arrive_as_they_are_made(town: Town) -> None:
    gate = asyncio.Event()
    word = {"choices": [{"index": 0, "text": "word", "finish_reason": None}]}
    finish = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
    for engine in town.decoders:
        engine.script = [Answer(200, EVENTS, [event_bytes(word), gate, event_bytes(finish), event_bytes("[DONE]")])]
    async with (
        httpx2.AsyncClient(base_url=town.address) as client,
        client.stream("POST", "/v1/completions", json={"model": "m", "prompt": "a", "stream": True}) as response,
    ):
        parts = response.aiter_bytes()
        assert b"word" in await asyncio.wait_for(anext(parts), PATIENCE_SECONDS)
        gate.set()
        rest = b"".join([part async for part in parts])
    assert rest.endswith(b"data: [DONE]\n\n")


def never() -> RouterSettings:
    raise AssertionError("nobody asks for the file again")


def test_a_port_in_use_is_told() -> None:
    taken = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with pytest.raises(ConfigurationError, match=f"port {port} of 127.0.0.1 is in use"):
        run(router_settings({"port": port, "workers": [{"url": "http://127.0.0.1:1"}]}), never)
    taken.close()


def test_no_engine_is_told() -> None:
    with pytest.raises(ConfigurationError, match="no Prefiller can be reached"):
        run(router_settings({"port": 0, "workers": [{"url": "http://127.0.0.1:1"}]}), never)


async def test_what_a_start_cannot_know_is_said_before_it_serves(
    town: Town, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for tuning in ("_spare_the_collector", "_keep_freed_memory"):
        monkeypatch.setattr(serving, tuning, lambda: None)
    town.p.contract = contract(Role.PRODUCER, kv_lease_seconds=None)
    settings = router_settings({"workers": [{"url": worker.origin} for worker in town.app.fleet.workers]})
    said: list[str] = []

    def ready() -> None:
        said.extend(record.message for record in caplog.records if record.message.startswith("not checked: "))
        os.kill(os.getpid(), signal.SIGTERM)

    await serving.serve(settings, RouterApp(settings), listen("127.0.0.1", 0), ready)
    assert [f"whether {town.app.fleet.workers[0].origin} keeps KV" in one for one in said] == [True]


@asynccontextmanager
async def process_in_front(town: Town, *options: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    p, *decoders = [worker.origin for worker in town.app.fleet.workers]
    async with router_process([p], decoders, *options) as (process, address):
        yield process, address
        assert await asyncio.wait_for(process.wait(), PATIENCE_SECONDS) == 0


async def test_the_process_says_when_it_is_ready_and_ends_when_told(town: Town) -> None:
    gate = asyncio.Event()
    for engine in town.decoders:
        engine.script = [Answer(200, EVENTS, [event_bytes(WORD), gate, event_bytes(FINISH), event_bytes("[DONE]")])]
    async with (
        process_in_front(town, "--enable-decoder-append-prefill") as (process, address),
        httpx2.AsyncClient(base_url=address, timeout=PATIENCE_SECONDS) as client,
    ):
        assert (await client.get("/ready")).status_code == 200
        request = asyncio.create_task(client.post("/v1/completions", json=STREAM))
        await until(lambda: any(engine.seen for engine in town.decoders))
        os.kill(process.pid, signal.SIGTERM)
        await until(lambda: refuses(address))
        gate.set()
        assert (await request).text.endswith("data: [DONE]\n\n")


async def test_what_outlasts_the_grace_ends_in_an_error_event(town: Town, tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text("shutdown_grace_seconds: 1\n")
    for engine in town.decoders:
        engine.script = [Answer(200, EVENTS, [event_bytes(WORD), asyncio.Event()])]
    async with (
        process_in_front(town, "--config", str(path)) as (process, address),
        httpx2.AsyncClient(base_url=address, timeout=PATIENCE_SECONDS) as client,
    ):
        async with client.stream("POST", "/v1/completions", json=STREAM) as response:
            parts = response.aiter_text()
            told = await anext(parts)
            os.kill(process.pid, signal.SIGTERM)
            events = "".join([told, *[part async for part in parts]]).split("\n\n")
        assert "word" in events[0] and "shutting_down" in events[1]
