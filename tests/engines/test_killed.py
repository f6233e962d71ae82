"""A2, A3, B2, B4, B13: a real Decoder is killed in the midst of its sessions, and another life of it takes its place.

The router stands in front, in this process. Every answer is held against that of one engine alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from schedloom.demo.engines import EngineSpec, Fleet, free_ports
from schedloom.demo.model import cached_model
from schedloom.demo.scenario import APPEND_ON
from schedloom.router.app import RouterApp
from schedloom.router.laboratory.client import Client
from tests.engines.fleets import PLUGINS, Pair, complete, prompt, request, token_ids, undisturbed

pytestmark = [pytest.mark.engines, pytest.mark.deep, pytest.mark.timeout(900), pytest.mark.anyio]

SESSIONS = 3
FIRST_TURN, APPENDED = 300, 40


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class System:
    """The fleet, whose Decoder may be another process than before, and what each session has said so far."""

    fleet: Fleet
    histories: list[list[int]] = field(default_factory=list)

    @property
    def pair(self) -> Pair:
        return Pair(self.fleet.engines["prefiller"], self.fleet.engines["decoder"])

    async def turn(self, app: RouterApp) -> list[str]:
        """Every session's next turn, each exact: the router's decisions."""
        decisions = []
        for number, history in enumerate(self.histories):
            received = await complete(app, request(history), f"session {number}")
            assert token_ids(received) == undisturbed(self.pair.prefiller, history)
            history.extend(token_ids(received) + prompt(number + len(history), APPENDED))
            decisions.append(received.decision)
        return decisions

    def kill_decoder(self) -> EngineSpec:
        """By SIGKILL to its server, as an operating system short of memory does it."""
        decoder = self.fleet.engines["decoder"]
        keeper = decoder.process.pid
        (server,) = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        os.kill(int(server), signal.SIGKILL)
        decoder.process.wait()
        return decoder.spec

    def restart_decoder(self, spec: EngineSpec) -> None:
        self.fleet.stop("decoder")
        self.fleet.start(spec)


@pytest.fixture(scope="module", params=["v1", "v2"])
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    ports = free_ports(4)
    common: dict[str, Any] = {"environment": PLUGINS, "runner": request.param}
    specs = [
        EngineSpec("prefiller", ports[0], "producer", ports[1], **common),
        EngineSpec("decoder", ports[2], "consumer", ports[3], additional_config=APPEND_ON, **common),
    ]
    with Fleet(specs, cached_model(), tmp_path_factory.mktemp("logs")) as fleet:
        yield System(fleet, [prompt(seed, FIRST_TURN) for seed in range(SESSIONS)])


async def test_a_killed_decoder_gets_its_sessions_back_by_transfer(system: System) -> None:
    async with system.pair.routed(enable_decoder_append_prefill=True) as app:
        assert await system.turn(app) == ["pd"] * SESSIONS
        assert await system.turn(app) == ["append"] * SESSIONS
        epoch = epoch_of_decoder(app)
        spec = system.kill_decoder()
        refused = await complete(app, request(system.histories[0]), "session 0")
        assert refused.status in (502, 503), refused.body
        assert refused.json["error"]["message"]
        system.restart_decoder(spec)
        await app.membership.look_at_all()
        assert epoch_of_decoder(app) != epoch
        assert await system.turn(app) == ["pd"] * SESSIONS
        assert await system.turn(app) == ["append"] * SESSIONS
        await system.pair.until_free(system.pair.prefiller, system.pair.decoder)


async def test_a_stream_whose_decoder_is_killed_ends_in_an_error(system: System) -> None:
    async with system.pair.routed(enable_decoder_append_prefill=True) as app:
        client, killed = Client(app), list[EngineSpec]()

        def kill_soon() -> None:
            asyncio.get_running_loop().call_later(0.5, lambda: killed.append(system.kill_decoder()))

        client.on_start = kill_soon
        body = request(prompt(90, FIRST_TURN), stream=True, ignore_eos=True, max_tokens=6000)
        received = await client.post("/v1/completions", body)
        assert received.status == 200
        assert "error" in received.objects[-1], received.events[-2:]
        assert 0 < len(received.objects) < 6000
        system.restart_decoder(*killed)
        await app.membership.look_at_all()
        assert await system.turn(app) == ["pd"] * SESSIONS


def epoch_of_decoder(app: RouterApp) -> str:
    (decoder,) = app.fleet.decoders
    return decoder.contract.epoch
