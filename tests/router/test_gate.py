from __future__ import annotations

import asyncio

import pytest

from schedloom.router.failures import Failure
from schedloom.router.gate import Gate
from tests.router.conftest import Make
from tests.router.fakes import Answer, Seen, decoder, prefiller

pytestmark = pytest.mark.anyio


class Visit:
    """A stay inside a gate, as long as the test wants."""

    def __init__(self, gate: Gate) -> None:
        self.inside = asyncio.Event()
        self.go = asyncio.Event()
        self.task = asyncio.create_task(self._stay(gate))

    async def _stay(self, gate: Gate) -> None:
        if not gate.enter():
            await gate.wait()
        try:
            self.inside.set()
            await self.go.wait()
        finally:
            gate.leave()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_line_is_served_in_order() -> None:
    gate = Gate(limit=2, waiting=10, patience=5)
    visits = [Visit(gate) for _ in range(5)]
    await settle()
    assert [visit.inside.is_set() for visit in visits] == [True, True, False, False, False]
    assert (gate.inside, gate.waiting) == (2, 3)
    for number, visit in enumerate(visits):
        visit.go.set()
        await settle()
        assert [other.inside.is_set() for other in visits] == [True] * min(5, number + 3) + [False] * (2 - number)
    assert (gate.inside, gate.waiting) == (0, 0)


async def test_a_full_line_refuses_at_once() -> None:
    gate = Gate(limit=1, waiting=1, patience=5)
    visits = [Visit(gate) for _ in range(3)]
    await settle()
    with pytest.raises(Failure) as refused:
        await visits[2].task
    assert refused.value.status == 503
    assert (b"retry-after", b"1") in refused.value.headers
    for visit in visits[:2]:
        visit.go.set()
        await visit.task
    assert (gate.inside, gate.waiting) == (0, 0)


async def test_where_there_is_a_line_no_more_may_come_at_once_than_it_has_room_for() -> None:
    gate = Gate(limit=2, waiting=1, patience=5)
    assert all(gate.may_come() for _ in range(5))
    visits = [Visit(gate) for _ in range(2)]
    await settle()
    assert [gate.may_come() for _ in range(2)] == [True, False]
    for visit in visits:
        visit.go.set()
        await visit.task
    assert all(gate.may_come() for _ in range(4))


async def test_patience_ends() -> None:
    gate = Gate(limit=1, waiting=1, patience=0.01)
    first, second = Visit(gate), Visit(gate)
    with pytest.raises(Failure):
        await second.task
    first.go.set()
    await first.task
    assert (gate.inside, gate.waiting) == (0, 0)


@pytest.mark.parametrize("just_called", [False, True])
async def test_whoever_leaves_the_line_keeps_nobody_waiting(just_called: bool) -> None:
    gate = Gate(limit=1, waiting=5, patience=5)
    first, second, third = Visit(gate), Visit(gate), Visit(gate)
    await settle()
    if just_called:
        first.go.set()
        await asyncio.sleep(0)
    second.task.cancel()
    first.go.set()
    await settle()
    assert third.inside.is_set()
    third.go.set()
    await settle()
    assert (gate.inside, gate.waiting) == (0, 0)


async def test_excess_is_answered_with_when_to_come_again(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d, max_in_flight=1, max_waiting=1)
    go = asyncio.Event()

    async def wait(seen: Seen) -> Answer:
        await go.wait()
        return p._ordinary(seen)

    p.script = [wait, wait]
    requests = [asyncio.create_task(router.client.chat()) for _ in range(3)]
    await settle()
    refused = await requests[2]
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert refused.json["error"]["code"] == "overloaded"
    go.set()
    assert [(await request).status for request in requests[:2]] == [200, 200]
