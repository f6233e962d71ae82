"""B3, R6: a real Decoder whose engine stands still until the KV that it is to pull is gone, and then goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from schedloom.demo.engines import Engine
from tests.engines.fleets import Pair, complete, metric, prompt, request, running_pair, token_ids, undisturbed

pytestmark = [pytest.mark.engines, pytest.mark.deep, pytest.mark.timeout(300), pytest.mark.anyio]

LEASE = 6
STREAM = 1500
ROOM = 4096
"""Tokens: what a request may have, and all that a Prefiller has blocks for but a few."""

SMALL = (f"--max-model-len={ROOM}", f"--kv-cache-memory-bytes={(ROOM + 64) * 4096}")
ONE_AT_A_TIME = (f"--max-model-len={ROOM}", "--max-num-seqs=1")
PATIENT = {"handoff_timeout_seconds": LEASE / 2, "hung_after_seconds": 60}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=["v1", "v2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    logs = tmp_path_factory.mktemp("logs")
    with running_pair(logs, "NixlConnector", SMALL, ONE_AT_A_TIME, request.param, kv_lease_duration=LEASE) as pair:
        yield pair


async def test_a_request_that_was_handed_over_meanwhile_is_exact(pair: Pair) -> None:
    body = request(prompt(1))
    async with pair.routed(**PATIENT) as app:
        with standing_still(pair.decoder):
            waiting = asyncio.create_task(complete(app, body))
            await handed_over(pair)
            await outlive_lease(pair, 1)
        assert token_ids(await waiting) == undisturbed(pair.prefiller, body["prompt"])
    assert computed_here(pair) == 1


async def test_a_request_that_waited_for_room_is_exact(pair: Pair) -> None:
    """The heartbeat that leaves as the engine goes on is too late for it."""
    body, before = request(prompt(2)), computed_here(pair)
    async with pair.routed(**PATIENT) as app:
        long = asyncio.create_task(complete(app, request(prompt(4), max_tokens=STREAM, ignore_eos=True, stream=True)))
        while metric(pair.decoder, "vllm:num_requests_running") < 1:
            await asyncio.sleep(0.1)
        waiting = asyncio.create_task(complete(app, body))
        await handed_over(pair)
        with standing_still(pair.decoder):
            await outlive_lease(pair, 1)
        assert not long.done(), "inconclusive: there was room at once"
        assert token_ids(await waiting) == undisturbed(pair.prefiller, body["prompt"])
        assert len(token_ids(await long)) == STREAM
    assert computed_here(pair) - before == 1


def computed_here(pair: Pair) -> int:
    return pair.decoder.log.read_text().count("is computed here")


async def handed_over(pair: Pair) -> None:
    """Returns once the Prefiller keeps KV and the Decoder has surely been asked."""
    while metric(pair.prefiller, "vllm:kv_cache_usage_perc") == 0:
        await asyncio.sleep(0.1)
    await asyncio.sleep(1)


async def outlive_lease(pair: Pair, leases: int) -> None:
    """Until so many more are over, and all of the Prefiller's blocks hold something else."""
    over = pair.kept()[1] + leases
    await asyncio.sleep(LEASE)
    for seed in range(3):
        await asyncio.to_thread(undisturbed, pair.prefiller, prompt(100 + seed, ROOM // 2))
    assert pair.kept()[1] == over, "inconclusive: the KV is still kept"


@contextmanager
def standing_still(engine: Engine) -> Iterator[None]:
    """Its HTTP server goes on."""
    core = _core_of(engine.process.pid)
    os.kill(core, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(core, signal.SIGCONT)


def _core_of(process: int) -> int:
    (core,) = [one for one in _below(process) if b"EngineCore" in Path(f"/proc/{one}/cmdline").read_bytes()]
    return core


def _below(process: int) -> Iterator[int]:
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from _below(child)
