"""B1, B13, R12: as long as one Prefiller and one Decoder are well, requests are served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from schedloom.router.breaker import CONSECUTIVE_FAILURES
from schedloom.router.upstream import BrokenOff, ConnectFailed
from tests.router.conftest import Make
from tests.router.fakes import Answer, FakeEngine, Seen, decoder, prefiller

pytestmark = pytest.mark.anyio

REQUESTS = 1_000
JSON = b"application/json"
MOST_FAILED = CONSECUTIVE_FAILURES
"""A request whose Prefiller and then Decoder fails has had its second try, until one of them is left out."""

Trouble = Callable[[FakeEngine, int], None]


def dead(engine: FakeEngine, number: int) -> None:
    engine.reachable = False


def failing(engine: FakeEngine, number: int) -> None:
    engine.always = Answer.error(500)


def breaking_off(engine: FakeEngine, number: int) -> None:
    engine.always = Answer(200, JSON, [BrokenOff("lost")])


def full(engine: FakeEngine, number: int) -> None:
    engine.always = Answer.error(503)


def flapping(engine: FakeEngine, number: int) -> None:
    engine.always = Answer(200, JSON, [ConnectFailed("refused")]) if number // 50 % 2 else None


def slow(engine: FakeEngine, number: int) -> None:
    async def answer(seen: Seen) -> Answer:
        await asyncio.sleep(0.001)
        return engine._ordinary(seen)

    engine.script = [answer]


@pytest.mark.parametrize("trouble", [dead, failing, breaking_off, full, flapping, slow])
@pytest.mark.parametrize("where", ["p", "d", "pd"])
async def test_while_one_of_each_is_well_requests_are_served(bench: Make, trouble: Trouble, where: str) -> None:
    prefillers, decoders = [prefiller(0), prefiller(1)], [decoder(0), decoder(1)]
    router = await bench(*prefillers, *decoders)
    troubled = [pool[0] for pool, letter in ((prefillers, "p"), (decoders, "d")) if letter in where]
    for _ in range(100):
        assert (await router.client.chat()).status == 200
    statuses = []
    for number in range(REQUESTS):
        for engine in troubled:
            trouble(engine, number)
        statuses.append((await router.client.chat(f"s{number % 20}", stream=bool(number % 2))).status)
    assert REQUESTS - statuses.count(200) <= (MOST_FAILED if len(troubled) == 2 else 0)
