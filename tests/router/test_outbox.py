"""What is written in one round of the event loop is written together (B1)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from schedloom.router.http.outbox import Outbox

pytestmark = pytest.mark.anyio

Said = list[tuple[str, bytes]]


class FakeTransport(asyncio.WriteTransport):
    def __init__(self, name: str, said: Said) -> None:
        super().__init__()
        self._name = name
        self._said = said
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._said.append((self._name, bytes(data)))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self.closed


class Parts(FakeTransport):
    """Tells in which parts it was given what it writes."""

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        for data in list_of_data:
            self.write(data)


@pytest.fixture
def said() -> Said:
    return []


async def a_round() -> None:
    await asyncio.sleep(0)


async def crowded(outbox: Outbox, said: Said) -> None:
    """A round of two writes is behind it."""
    for name in "xy":
        outbox.put(FakeTransport(name, said), b"")
    await a_round()
    said.clear()


async def test_what_is_written_alone_is_not_held_back(said: Said) -> None:
    outbox, a = Outbox(), FakeTransport("a", said)
    for number in range(3):
        outbox.put(a, b"head", b"%d" % number)
        assert said.pop() == ("a", b"head%d" % number)
        await a_round()
    assert not said


async def test_several_are_written_together_once_to_each_connection_and_in_order(said: Said) -> None:
    outbox, a, b = Outbox(), FakeTransport("a", said), FakeTransport("b", said)
    await crowded(outbox, said)
    for transport, data in ((a, b"1"), (b, b"2"), (a, b"3")):
        outbox.put(transport, data)
    assert not said
    await a_round()
    assert said == [("a", b"13"), ("b", b"2")]


@pytest.mark.parametrize("bodies", [(b"", b"B"), (b"A", b""), (b"A", b"B")])
async def test_heads_and_bodies_keep_their_order(said: Said, bodies: tuple[bytes, bytes]) -> None:
    outbox, a = Outbox(), FakeTransport("a", said)
    await crowded(outbox, said)
    for head, body in zip((b"1", b"2"), bodies, strict=True):
        outbox.put(a, head, body)
    await a_round()
    assert said == [("a", b"1%b2%b" % bodies)]


@pytest.mark.parametrize("heads", [(b"1",), (b"1", b"2"), (b"1", b"2", b"3")])
@pytest.mark.parametrize("is_held", [False, True])
async def test_no_empty_part_is_given_to_a_connection(said: Said, heads: tuple[bytes, ...], is_held: bool) -> None:
    """From Python 3.12 on asyncio's own transport never gets rid of one behind the others."""
    outbox, a = Outbox(), Parts("a", said)
    if is_held:
        await crowded(outbox, said)
    for head in heads:
        outbox.put(a, head)
    await a_round()
    assert said == [("a", head) for head in heads]


async def test_a_large_body_is_not_joined_to_its_head(said: Said) -> None:
    outbox = Outbox()
    await crowded(outbox, said)
    transport = Parts("a", said)
    outbox.put(transport, b"head", b"body")
    await a_round()
    assert said == [("a", b"head"), ("a", b"body")]


async def test_one_in_a_round_is_held_back_no_more(said: Said) -> None:
    outbox, a = Outbox(), FakeTransport("a", said)
    await crowded(outbox, said)
    outbox.put(a, b"held")
    await a_round()
    outbox.put(a, b"at once")
    assert said == [("a", b"held"), ("a", b"at once")]


async def test_what_is_held_can_be_written_before_its_time(said: Said) -> None:
    outbox, a = Outbox(), FakeTransport("a", said)
    await crowded(outbox, said)
    outbox.put(a, b"1")
    outbox.empty()
    assert said == [("a", b"1")]
    outbox.put(a, b"2")
    await a_round()
    assert said == [("a", b"1"), ("a", b"2")]


async def test_who_is_closed_by_then_is_left_out(said: Said) -> None:
    outbox, a, b = Outbox(), FakeTransport("a", said), FakeTransport("b", said)
    await crowded(outbox, said)
    outbox.put(a, b"1")
    outbox.put(b, b"2")
    a.closed = True
    await a_round()
    assert said == [("b", b"2")]


@pytest.mark.parametrize("head, body", [(100_000, 0), (10, 99_990)])
async def test_much_is_not_held_back(said: Said, head: int, body: int) -> None:
    outbox, a = Outbox(), FakeTransport("a", said)
    await crowded(outbox, said)
    for _ in range(5):
        outbox.put(a, bytes(head), bytes(body))
    assert [len(data) for _, data in said] == [300_000]
    await a_round()
    assert [len(data) for _, data in said] == [300_000, 200_000]


async def test_a_large_body_is_not_held_back(said: Said) -> None:
    outbox, a = Outbox(), FakeTransport("a", said)
    await crowded(outbox, said)
    outbox.put(a, b"head", bytes(300_000))
    assert [len(data) for _, data in said] == [300_004]
