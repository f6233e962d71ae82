"""A3, B2, B7: a real Decoder of two data-parallel ranks: sessions stay on theirs, and each waits for the other.

The model is a mixture of experts: the ranks of others are engines of their own, which know nothing of each other.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from schedloom.adapters.engine.trace import FILE_VARIABLE
from schedloom.demo.engines import EngineSpec, Fleet, Runner, free_ports
from schedloom.demo.model import cached_model
from tests.engines.experts import mixture_of_experts
from tests.engines.fleets import PLUGINS, Pair, complete, metric, prompt, request, token_ids, undisturbed

pytestmark = [pytest.mark.engines, pytest.mark.deep, pytest.mark.timeout(900), pytest.mark.anyio]

RANKS, TURNS = 2, 3
SESSIONS = 3
"""Odd: vLLM, which deals requests out in turn, would have each move to the other rank in every turn."""

SLOTS = 2
"""Requests that a rank has room for: with so many it is full."""

STREAM, NEWCOMER = 240, 4
"""Tokens of answers."""

POLICIES = {
    "policies": [{"name": "append_prefill"}, {"name": "balance", "max_hold_seconds": 600.0, "stale_seconds": 30.0}]
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@dataclass(frozen=True)
class System(Pair):
    trace: Path

    def answered(self) -> list[int]:
        """Requests that each rank has completed."""
        return [int(metric(self.decoder, f'vllm:request_success_total{{engine="{rank}"')) for rank in range(RANKS)]

    def running(self, rank: int) -> int:
        return int(metric(self.decoder, f'vllm:num_requests_running{{engine="{rank}"'))

    def held_because_of(self, rank: int) -> int:
        events = [json.loads(line) for line in self.trace.read_text().splitlines()]
        return sum(event["decision"] == "HOLD" and event["rank"] == rank for event in events)

    def switch_balance(self, mode: str) -> None:
        url = f"{self.decoder.url}/schedloom/policies/balance"
        send(url, {"mode": mode}, method="PUT")

    def ask(self, rank: int, body: dict[str, Any]) -> list[int]:
        answer = send(f"{self.decoder.url}/v1/completions", body, {"X-data-parallel-rank": str(rank)})
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens


def send(url: str, body: dict[str, Any], headers: dict[str, str] | None = None, method: str = "POST") -> Any:
    told = {"Content-Type": "application/json", **(headers or {})}
    asked = urllib.request.Request(url, json.dumps(body).encode(), told, method=method)
    with urllib.request.urlopen(asked, timeout=120) as response:
        return json.loads(response.read() or b"null")


@pytest.fixture(scope="module", params=["v1", "v2"])
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("ranks")
    (trace := folder / "decisions.jsonl").touch()
    model = mixture_of_experts(cached_model(), folder / "model")
    with Fleet(specs(request.param, trace), model, folder, patience_seconds=400) as fleet:
        yield System(fleet.engines["prefiller"], fleet.engines["decoder"], trace)


def specs(runner: Runner, trace: Path) -> list[EngineSpec]:
    ports = free_ports(5)
    common: dict[str, Any] = {"runner": runner, "max_model_len": 1024, "kv_cache_bytes": 64 << 20}
    ranks = {FILE_VARIABLE: str(trace), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    arguments = (
        f"--data-parallel-size={RANKS}",
        f"--data-parallel-rpc-port={ports[4]}",
        f"--max-num-seqs={SLOTS}",
    )
    return [
        EngineSpec("prefiller", ports[0], "producer", ports[1], environment=PLUGINS, **common),
        EngineSpec(
            "decoder",
            ports[2],
            "consumer",
            ports[3],
            environment=PLUGINS | ranks,
            additional_config={"scheduler_config": POLICIES},
            arguments=arguments,
            **common,
        ),
    ]


async def test_a_session_stays_on_its_rank(system: System) -> None:
    histories = [prompt(seed) for seed in range(SESSIONS)]
    async with system.routed(enable_decoder_append_prefill=True) as app:
        seen = []
        for turn in range(TURNS):
            for number, history in enumerate(histories):
                before = system.answered()
                received = await complete(app, request(history), f"session {number}")
                assert received.decision == ("append" if turn else "pd")
                assert token_ids(received) == undisturbed(system.prefiller, history)
                seen.append([after - first for first, after in zip(before, system.answered(), strict=True)])
                history.extend(token_ids(received) + prompt(number + len(history), 40))
        first_turn = seen[:SESSIONS]
        assert {tuple(ranks) for ranks in first_turn} == {(0, 1), (1, 0)}
        assert seen == first_turn * TURNS
    await system.until_free(system.prefiller, system.decoder)
    assert system.kept() == (0, 0)


@pytest.mark.parametrize("full", range(RANKS))
async def test_nobody_is_admitted_while_the_other_rank_is_full(system: System, full: int) -> None:
    """And with the policy switched off somebody is: the switch reaches both ranks."""
    held = system.held_because_of(full)
    assert not await is_served_beside_a_full_rank(system, full, seed=100 * full)
    assert system.held_because_of(full) > held
    held = system.held_because_of(full)
    system.switch_balance("off")
    try:
        assert await is_served_beside_a_full_rank(system, full, seed=100 * full + 50)
    finally:
        system.switch_balance("on")
    assert system.held_because_of(full) == held


async def is_served_beside_a_full_rank(system: System, full: int, seed: int) -> bool:
    """Whether somebody on the other rank is answered while this one has no slot left. All answers are exact."""
    stream = {"ignore_eos": True, "max_tokens": STREAM}
    bodies = [request(prompt(200 + seed + index, 40), **stream) for index in range(SLOTS)]
    streams = [asyncio.create_task(asyncio.to_thread(system.ask, full, body)) for body in bodies]
    await until(lambda: system.running(full) == SLOTS)
    newcomer = request(prompt(300 + seed, 40), max_tokens=NEWCOMER)
    answer = await asyncio.to_thread(system.ask, 1 - full, newcomer)
    served = not any(stream.done() for stream in streams)
    for body, tokens in zip([*bodies, newcomer], [*await asyncio.gather(*streams), answer], strict=True):
        more = {key: body[key] for key in ("ignore_eos", "max_tokens") if key in body}
        assert tokens == undisturbed(system.prefiller, body["prompt"], **more)
    return served


async def until(holds: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
