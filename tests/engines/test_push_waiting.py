"""B3, R6: a real Decoder that has no room for longer than a real Prefiller's lease, where KV is written."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from schedloom.demo.engines import Engine
from tests.engines.fleets import Pair, complete, metric, prompt, request, running_pair, token_ids, undisturbed

pytestmark = [pytest.mark.engines, pytest.mark.deep, pytest.mark.timeout(300), pytest.mark.anyio]

LEASE = 6
"""Seconds, which a stream of so many tokens exceeds several times over."""

STREAM = 3000


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    logs, one_at_a_time = tmp_path_factory.mktemp("logs"), ("--max-num-seqs=1",)
    with running_pair(logs, "NixlPushConnector", decoder=one_at_a_time, kv_lease_duration=LEASE) as pair:
        yield pair


async def test_kv_is_kept_as_long_as_a_decoder_waits_for_room(pair: Pair) -> None:
    """Without the Prefiller's heed it is gone by then, and the Decoder waits for it to the end of its life."""
    async with pair.routed(handoff_timeout_seconds=LEASE - 1) as app:
        long = asyncio.create_task(complete(app, request(prompt(1), max_tokens=STREAM, ignore_eos=True, stream=True)))
        await until(pair.decoder, "vllm:num_requests_running", 1)
        bodies = [request(prompt(10 + number), stream=number % 2 == 0) for number in range(2)]
        waiting = [asyncio.create_task(complete(app, body)) for body in bodies]
        await until(pair.prefiller, "vllm:prompt_tokens_total", 3 * len(prompt(1)))
        await asyncio.sleep(LEASE + 2)
        assert not long.done(), "inconclusive: the lease was not over"
        assert len(token_ids(await long)) == STREAM
        for body, received in zip(bodies, await asyncio.wait_for(asyncio.gather(*waiting), 60), strict=True):
            assert token_ids(received) == undisturbed(pair.prefiller, body["prompt"])
    await pair.until_free(pair.prefiller, pair.decoder)
    assert pair.kept() == (0, 0)
    assert metric(pair.decoder, "vllm:kv_cache_usage_perc") == 0


async def until(engine: Engine, name: str, least: float) -> None:
    while metric(engine, name) < least:
        await asyncio.sleep(0.1)
