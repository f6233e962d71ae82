"""How long requests, their legs and their events take, as the figures tell it; on a clock that engines move."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import pytest

from tests.router.clock import Clock
from tests.router.conftest import Bench, Make
from tests.router.fakes import BROKEN, Answer, FakeEngine, Seen, decoder, prefiller

pytestmark = pytest.mark.anyio


class Pause(asyncio.Event):
    """A step of an answer that takes its time."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self._clock = clock
        self._seconds = seconds

    async def wait(self) -> Literal[True]:
        self._clock.now += self._seconds
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def slow(clock: Clock, engine: FakeEngine, seconds: float) -> Callable[[Seen], Awaitable[Answer]]:
    async def answer(seen: Seen) -> Answer:
        clock.now += seconds
        return engine._ordinary(seen)

    return answer


def paced(clock: Clock, engine: FakeEngine, seconds: float, broken: bool = False) -> Any:
    async def answer(seen: Seen) -> Answer:
        first, *words, end, done = Answer.stream(*engine._chunks(seen)).steps
        between = [step for word in words for step in (Pause(clock, seconds), word)]
        rest = [BROKEN] if broken else [Pause(clock, seconds), end, done]
        return Answer(200, b"text/event-stream", [first, *between, *rest])

    return answer


def taken(router: Bench, figure: str, **labels: str) -> tuple[float, float]:
    return router.count(f"{figure}_seconds_count", **labels), router.count(f"{figure}_seconds_sum", **labels)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_leg_tells_what_it_took(bench: Make, clock: Clock, stream: bool) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    p.script, d.script = [slow(clock, p, 0.25)], [slow(clock, d, 0.5), slow(clock, d, 0.75)]
    for _ in range(2):
        assert (await router.client.chat("s", stream=stream)).status == 200
    assert taken(router, "leg", leg="prefill") == (1, 0.25)
    assert taken(router, "leg", leg="decode") == (1, 0.5)
    assert taken(router, "leg", leg="append") == (1, 0.75)
    assert taken(router, "time_to_first_byte", route="pd") == (1, 0.75)
    assert taken(router, "time_to_first_byte", route="append") == (1, 0.75)


async def test_a_leg_that_failed_or_was_turned_away_took_nothing(bench: Make, clock: Clock) -> None:
    p, d = prefiller(), decoder()
    d.holds = False
    router = await bench(p, d)
    p.script = [Answer.error(400)]
    assert (await router.client.chat("s")).status == 400
    d.script = [Answer.error(400)]
    assert (await router.client.chat("s")).status == 400
    assert taken(router, "leg", leg="prefill") == (1, 0)
    assert taken(router, "leg", leg="decode") == (0, 0)
    d.script = [slow(clock, d, 0.5) for _ in range(3)]
    assert [(await router.client.chat("s")).decision for _ in range(2)] == ["pd", "fallback"]
    assert taken(router, "leg", leg="append") == (0, 0) and taken(router, "leg", leg="decode") == (2, 1.0)


@pytest.mark.parametrize("told", [False, True])
async def test_the_time_between_events_is_told_once_for_a_stream(bench: Make, clock: Clock, told: bool) -> None:
    d = decoder(tokens=4)
    policies = [{"name": "prefix_aware"}] if told else []
    router = await bench(prefiller(), d, policies=policies)
    d.script = [paced(clock, d, 0.5)]
    assert (await router.client.chat(stream=True)).status == 200
    assert taken(router, "time_per_event", route="pd") == (1, 0.5)


async def test_what_is_no_stream_or_too_short_or_broken_has_no_time_between_events(bench: Make, clock: Clock) -> None:
    d = decoder()
    router = await bench(prefiller(), d)
    d.script = [slow(clock, d, 0.5), paced(clock, d, 0.5, broken=True)]
    await router.client.chat()
    await router.client.chat(stream=True)
    d.script = [Answer.stream("[DONE]")]
    await router.client.chat(stream=True)
    assert taken(router, "time_per_event", route="pd") == (0, 0)


async def test_what_finds_no_room_is_counted_apart_from_what_failed(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d, max_in_flight=1, max_waiting=0)
    goes_on = asyncio.Event()
    p.script = [Answer(200, steps=[goes_on])]
    first = asyncio.create_task(router.client.chat())
    while not router.app.door.gate.inside:
        await asyncio.sleep(0)
    assert (await router.client.chat()).status == 503
    goes_on.set()
    await first
    assert router.count("requests_total", route="none", outcome="shed") == 1
    assert router.count("requests_total", route="none", outcome="failed") == 0
