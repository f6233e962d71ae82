"""R3: when all engines of a role fail, what is tried again is bounded for each role, by every way of moving KV.

A thousand requests in ten seconds of a simulated clock, each of which needs a Prefiller and a Decoder.
"""

from __future__ import annotations

import asyncio

import pytest

from schedloom.core.wire import Role
from schedloom.router.http.upstream import TimedOut
from schedloom.router.laboratory.clock import simulate
from tests.router.fakes import JSON, Answer, Seen
from tests.router.test_availability import (
    CONNECTORS,
    Engine,
    Town,
    Trouble,
    cut,
    failing,
    failing_late,
    is_counted,
    refused,
)

REQUESTS, SECONDS = 1_000, 10
MOST = 1.2 * REQUESTS


async def hanging(seen: Seen, now: float) -> Answer:
    await asyncio.sleep(0.5)
    return Answer(200, JSON, [TimedOut("silent")])


class Storm(Town):
    """``count`` engines of each role, and clients without sessions."""

    def __init__(self, mode: str, count: int) -> None:
        super().__init__(mode)
        self.prefillers = [self._engine(f"p{number}", Role.PRODUCER) for number in range(count)]
        self.decoders = [self._engine(f"d{number}", Role.CONSUMER) for number in range(count)]

    async def play(self, troubled: list[Engine], trouble: Trouble, before: int) -> list[int]:
        """``before`` are requests that all went well. Returns the other requests' statuses."""
        async with self.running():
            await self._all(before)
            for engine in (*self.prefillers, *self.decoders):
                engine.seen.clear()
            for engine in troubled:
                engine.trouble = trouble
            return await self._all(REQUESTS)

    async def _all(self, count: int) -> list[int]:
        asked = []
        for number in range(count):
            asked.append(asyncio.ensure_future(self._chat(number)))
            await asyncio.sleep(SECONDS / REQUESTS)
        return list(await asyncio.gather(*asked))

    async def _chat(self, number: int) -> int:
        return (await self.client.chat(stream=number % 2 > 0, user=str(number))).status

    def dispatches(self) -> dict[str, int]:
        pools = {"p": self.prefillers, "d": self.decoders}
        return {role: sum(map(is_counted, seen_by(pool))) for role, pool in pools.items()}


def seen_by(pool: list[Engine]) -> list[Seen]:
    return [seen for engine in pool for seen in engine.seen]


TROUBLES: list[Trouble] = [refused, failing, failing_late, cut, hanging]

by_way = pytest.mark.parametrize("mode", CONNECTORS)
by_trouble = pytest.mark.parametrize("trouble", TROUBLES, ids=[trouble.__name__ for trouble in TROUBLES])


@by_way
@by_trouble
def test_while_all_decoders_fail_each_role_is_asked_for_a_fifth_more_at_most(mode: str, trouble: Trouble) -> None:
    storm = Storm(mode, 4)
    statuses = simulate(storm.play(storm.decoders, trouble, before=0))
    assert 200 not in statuses
    assert max(storm.dispatches().values()) <= MOST


@by_way
@by_trouble
def test_while_all_prefillers_fail_a_prefill_is_made_twice_only_where_a_decoder_waits(
    mode: str, trouble: Trouble
) -> None:
    """And then nothing else is tried again: what was made twice is owed to the budget."""
    storm = Storm(mode, 4)
    statuses = simulate(storm.play(storm.prefillers, trouble, before=0))
    assert 200 not in statuses
    assert storm.dispatches()["p"] <= (MOST if mode == "pull" else 2 * REQUESTS + 3)


def test_the_requests_before_count_as_well() -> None:
    storm = Storm("pull", 4)
    simulate(storm.play(storm.decoders, failing, before=200))
    assert max(storm.dispatches().values()) <= MOST + 0.2 * 200
