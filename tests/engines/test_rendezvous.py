"""R11, A2: a router that begins anew finds the sessions' KV on real Decoders, and computes it where it is gone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from schedloom.demo.conversation import Session
from schedloom.demo.engines import EngineSpec, Fleet, free_ports
from schedloom.demo.model import cached_model
from schedloom.demo.scenario import APPEND_ON
from schedloom.router.app import RouterApp
from schedloom.router.laboratory.client import Client, Received
from schedloom.router.settings import router_settings
from tests.engines.fleets import PLUGINS

pytestmark = [pytest.mark.engines, pytest.mark.deep, pytest.mark.timeout(900), pytest.mark.anyio]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    ports = free_ports(6)
    common: dict[str, Any] = {"environment": PLUGINS}
    decoding = common | {"additional_config": APPEND_ON}
    specs = [
        EngineSpec("prefiller", ports[0], "producer", ports[1], **common),
        EngineSpec("one", ports[2], "consumer", ports[3], **decoding),
        EngineSpec("other", ports[4], "consumer", ports[5], **decoding),
    ]
    with Fleet(specs, cached_model(), tmp_path_factory.mktemp("logs")) as fleet:
        yield fleet


@asynccontextmanager
async def router(fleet: Fleet, *names: str) -> AsyncIterator[RouterApp]:
    workers = [{"url": fleet.engines[name].url} for name in names]
    policies = [{"name": "session_owner"}, {"name": "rendezvous"}]
    app = RouterApp(router_settings({"workers": workers, "policies": policies}))
    await app.start()
    yield app
    await app.close()


async def turn(app: RouterApp, session: Session) -> Received:
    body = {"model": "demo", "messages": session.messages, "temperature": 0, "max_tokens": 12}
    received = await Client(app).post("/v1/chat/completions", body, {"X-Session-ID": session.name})
    assert received.status == 200, received.body
    session.continue_with(received.text, len(session.messages))
    return received


async def test_a_restarted_router_appends_to_what_decoders_hold(fleet: Fleet) -> None:
    sessions = [Session.opened(f"s{number}", "header") for number in range(6)]
    async with router(fleet, "prefiller", "one", "other") as app:
        assert [(await turn(app, one)).decision for one in sessions] == ["pd"] * 6
        assert [(await turn(app, one)).decision for one in sessions] == ["append"] * 6
    stranger = Session.opened("stranger", "header")
    stranger.continue_with("an answer of somebody else's", 1)
    async with router(fleet, "other", "one", "prefiller") as app:
        assert [(await turn(app, one)).decision for one in sessions] == ["append"] * 6
        assert [(await turn(app, stranger)).decision for _ in range(2)] == ["fallback", "append"]
