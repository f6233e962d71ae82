"""B3, R6: KV that a real Prefiller writes to a real Decoder by NIXL, through the router."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.fleets import (
    REFUSED,
    Pair,
    complete,
    leave_after,
    metric,
    prompt,
    request,
    running_pair,
    token_ids,
    undisturbed,
)

pytestmark = [pytest.mark.engines, pytest.mark.deep, pytest.mark.timeout(600), pytest.mark.anyio]

DISCONNECTS = 50


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with running_pair(tmp_path_factory.mktemp("logs"), "NixlPushConnector") as pair:
        yield pair


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_are_exact(pair: Pair, stream: bool) -> None:
    async with pair.routed() as app:
        for seed in range(4):
            tokens = prompt(seed + 10 * stream, 200 + 130 * seed)
            received = await complete(app, request(tokens, stream=stream))
            assert received.decision == "pd"
            assert token_ids(received) == undisturbed(pair.prefiller, tokens)
            assert metric(pair.decoder, "vllm:prompt_tokens_total") > 0
    await pair.until_free(pair.prefiller, pair.decoder)
    assert pair.kept() == (0, 0)


async def test_clients_that_leave_strand_nothing_on_either_side(pair: Pair) -> None:
    chance = random.Random(7)
    before = metric(pair.prefiller, "vllm:nixl_bytes_transferred_count")
    async with pair.routed() as app:
        for number in range(DISCONNECTS):
            body = request(prompt(100 + number, 400), stream=number % 2 == 0, max_tokens=100)
            await leave_after(app, body, chance.choice([0.0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.3]))
        await pair.until_free(pair.prefiller, pair.decoder)
        assert token_ids(await complete(app, request(prompt(1)))) == undisturbed(pair.prefiller, prompt(1))
    await pair.until_free(pair.prefiller, pair.decoder)
    written = metric(pair.prefiller, "vllm:nixl_bytes_transferred_count") - before
    print(f"{DISCONNECTS} left, {written:.0f} prompts were written all the same")
    assert pair.kept() == (0, 0)
    assert metric(pair.decoder, "vllm:kv_cache_usage_perc") == 0
    assert metric(pair.decoder, "vllm:num_requests_waiting") == 0


@pytest.mark.parametrize("refused", REFUSED, ids=list)
async def test_what_a_decoder_refuses_strands_nothing(pair: Pair, refused: dict[str, Any]) -> None:
    """The Prefiller accepts its copy, which asks for one token; the Decoder refuses the client's own."""
    async with pair.routed() as app:
        for seed in range(5):
            received = await complete(app, request(prompt(300 + seed), **refused))
            assert received.status == 400, received.body
        await pair.until_free(pair.prefiller, pair.decoder)
    assert pair.kept() == (0, 0)
    assert metric(pair.decoder, "vllm:kv_cache_usage_perc") == 0
