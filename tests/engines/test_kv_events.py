"""X5: a real engine's KV events tell the router what it holds, and spare futile local attempts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from schedloom.core.routing import Held
from schedloom.demo.engines import EngineSpec, Fleet, free_ports
from schedloom.demo.model import cached_model
from schedloom.demo.scenario import APPEND_ON
from schedloom.router.app import RouterApp
from schedloom.router.laboratory.client import Client, Received
from schedloom.router.settings import router_settings

pytestmark = [pytest.mark.engines, pytest.mark.deep, pytest.mark.timeout(600)]

PLUGINS = {"VLLM_PLUGINS": "schedloom,schedloom_cpu_engine"}
KV_BYTES = 48 << 20
LENGTH = 600


@pytest.fixture(scope="module", params=["v1", "v2"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    ports = free_ports(6)
    events: dict[str, Any] = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{ports[4]}"}
    events["replay_endpoint"] = f"tcp://*:{ports[5]}"
    common: dict[str, Any] = {"runner": request.param, "kv_cache_bytes": KV_BYTES, "environment": PLUGINS}
    specs = [
        EngineSpec("p", ports[0], role="producer", side_channel_port=ports[1], **common),
        EngineSpec(
            "d",
            ports[2],
            role="consumer",
            side_channel_port=ports[3],
            additional_config=APPEND_ON,
            arguments=(f"--kv-events-config={json.dumps(events)}",),
            **common,
        ),
    ]
    with Fleet(specs, cached_model(), tmp_path_factory.mktemp("logs")) as fleet:
        yield [engine.url for engine in fleet.engines.values()]


@asynccontextmanager
async def router(engines: list[str], **residency: Any) -> AsyncIterator[tuple[RouterApp, Client]]:
    policies = [{"name": "session_owner"}, {"name": "kv_residency", **residency}]
    workers = [{"url": url} for url in engines]
    app = RouterApp(router_settings({"workers": workers, "policies": policies, "first_byte_timeout_seconds": 60}))
    await app.start()
    try:
        yield app, Client(app)
    finally:
        await app.close()


async def turn(client: Client, prompt: list[int] | str, session: str | None, **more: Any) -> Received:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 40, "temperature": 0, "return_token_ids": True, **more}
    received = await client.post("/v1/completions", body, {"X-Session-ID": session} if session else {})
    assert received.status == 200, received.body
    return received


def held(app: RouterApp, session: str) -> Held | None:
    (target,) = app.fleet.decoders[0].targets
    return app._view.residency.of_session(target, session)


async def comes_to_hold(app: RouterApp, session: str, expected: Held) -> None:
    for _ in range(100):
        if held(app, session) == expected:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{held(app, session)} and not {expected}")


def prompt(seed: int) -> list[int]:
    return [32 + (seed * 31 + index * 7 + index * index // 5) % 90 for index in range(LENGTH)]


@pytest.mark.anyio
async def test_a_sessions_kv_is_known_while_it_is_there(engines: list[str]) -> None:
    async with router(engines) as (app, client):
        first = await turn(client, prompt(1), "s")
        assert first.decision == "pd"
        history = prompt(1) + first.json["choices"][0]["token_ids"]
        whole_blocks = (len(history) - 1) // 32 * 32
        await comes_to_hold(app, "s", Held(whole_blocks, True))
        history += prompt(2)[:20]
        second = await turn(client, history, "s")
        assert second.decision == "append"
        assert second.json["usage"]["prompt_tokens_details"]["cached_tokens"] == whole_blocks
        for seed in range(3, 40):
            await turn(client, prompt(seed), None, max_tokens=1)
        await comes_to_hold(app, "s", Held(0, True))
        third = await turn(client, history, "s")
        assert third.decision == "pd"
        assert third.json["choices"][0]["token_ids"] == second.json["choices"][0]["token_ids"]
        registry = app.metrics.registry
        assert registry.get_sample_value("schedloom_router_local_attempts_total") == 1


@pytest.mark.anyio
async def test_a_router_that_comes_later_knows_too(engines: list[str]) -> None:
    async with router(engines) as (app, client):
        await turn(client, prompt(50), "late")
        await comes_to_hold(app, "late", Held((LENGTH + 39) // 32 * 32, True))
    async with router(engines) as (app, _):
        await comes_to_hold(app, "late", Held((LENGTH + 39) // 32 * 32, True))


@pytest.mark.anyio
async def test_a_text_is_found_by_its_tokens(engines: list[str]) -> None:
    text = "".join(map(chr, prompt(60)))
    async with router(engines, tokenize=True) as (app, client):
        await turn(client, text, None)
        (target,) = app.fleet.decoders[0].targets
        for _ in range(100):
            found = app._view.residency.of_prompt(target, list(text.encode()), None)
            if found is not None and found.tokens:
                break
            await asyncio.sleep(0.05)
        assert found == Held(LENGTH // 32 * 32, True)
        assert (app.metrics.registry.get_sample_value("schedloom_router_tokenize_seconds_count") or 0) == 1


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_the_contract_tells_where(engines: list[str]) -> None:
    async def ports() -> list[int | None]:
        async with router(engines) as (app, _):
            decoder = app.fleet.decoders[0].contract
            return [decoder.kv_events_port, decoder.kv_replay_port, app.fleet.prefillers[0].contract.kv_events_port]

    events, replay, none = asyncio.run(ports())
    assert events and replay and events != replay and none is None
