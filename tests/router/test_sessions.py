from __future__ import annotations

import tracemalloc

import pytest

from schedloom.core.routing import SessionOwner
from schedloom.router.sessions.store import MemorySessions, SessionKey
from tests.router.clock import Clock

pytestmark = pytest.mark.anyio

OWNER = SessionOwner("decoder-0", "e1", 0)
OTHER = SessionOwner("decoder-1", "e1", 1)


def key(session: str, tenant: str = "t", model: str = "m") -> SessionKey:
    return SessionKey(tenant, model, session)


async def test_a_session_has_the_owner_it_was_last_bound_to() -> None:
    sessions = MemorySessions(10, 60, Clock())
    assert await sessions.owner(key("a")) is None
    await sessions.bind(key("a"), OWNER)
    assert await sessions.owner(key("a")) == OWNER
    await sessions.bind(key("a"), OTHER)
    assert await sessions.owner(key("a")) == OTHER


@pytest.mark.parametrize("other", [key("A"), key("a "), key("a", tenant="u"), key("a", model="n")])
async def test_keys_are_equal_only_to_themselves(other: SessionKey) -> None:
    sessions = MemorySessions(10, 60, Clock())
    await sessions.bind(key("a"), OWNER)
    assert await sessions.owner(other) is None


async def test_the_least_recently_used_go_first() -> None:
    sessions = MemorySessions(3, 60, Clock())
    for name in "abc":
        await sessions.bind(key(name), OWNER)
    await sessions.owner(key("a"))
    await sessions.bind(key("d"), OWNER)
    assert [await sessions.owner(key(name)) is not None for name in "abcd"] == [True, False, True, True]


async def test_a_flood_of_sessions_stays_bounded() -> None:
    sessions = MemorySessions(100, 60, Clock())
    for number in range(10_000):
        await sessions.bind(key(str(number)), OWNER)
    assert len(sessions) == 100


@pytest.mark.parametrize("length", [36, 256])
async def test_a_full_table_takes_little_memory(length: int) -> None:
    tracemalloc.start()
    try:
        sessions = MemorySessions(10_000, 60, Clock())
        before, _ = tracemalloc.get_traced_memory()
        for number in range(30_000):
            await sessions.bind(SessionKey("tenant", "model", f"{number:>{length}}"), OWNER)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken < 10_000 * 64 * 2**20 / 100_000


async def test_idle_sessions_are_forgotten_and_used_ones_are_not() -> None:
    clock = Clock()
    sessions = MemorySessions(10, 60, clock)
    await sessions.bind(key("idle"), OWNER)
    await sessions.bind(key("used"), OWNER)
    clock.now += 40
    assert await sessions.owner(key("used")) == OWNER
    clock.now += 21
    await sessions.bind(key("new"), OWNER)
    assert len(sessions) == 2
    assert await sessions.owner(key("idle")) is None
    assert await sessions.owner(key("used")) == OWNER
    clock.now += 139
    assert await sessions.owner(key("used")) is None
