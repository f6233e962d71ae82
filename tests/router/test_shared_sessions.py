"""A table of sessions that several processes have at once (A2, B9): bounded, and wrong about nothing (R10)."""

from __future__ import annotations

import multiprocessing
import random
import re
import time
import uuid
from pathlib import Path

import pytest

from schedloom.core.errors import ConfigurationError
from schedloom.core.routing import SessionOwner
from schedloom.router.app import RouterApp
from schedloom.router.sessions.store import SessionKey
from schedloom.router.sessions.table import SharedSessions
from schedloom.router.settings import router_settings
from tests.router.clock import Clock
from tests.router.conftest import settings_for
from tests.router.fakes import FakeUpstream, decoder, prefiller
from tests.router.test_sessions import OTHER, OWNER, key

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "sessions"
    SharedSessions.create(path, 1_000)
    return path


@pytest.mark.parametrize("capacity", [10**15, 10**30])
def test_no_room_shows_at_the_start_and_not_when_a_session_is_kept(tmp_path: Path, capacity: int) -> None:
    with pytest.raises(ConfigurationError, match="no room for session_capacity"):
        SharedSessions.create(tmp_path / "sessions", capacity)


def test_all_room_is_taken_at_the_start(path: Path) -> None:
    assert path.stat().st_blocks * 512 >= path.stat().st_size > 0


async def test_what_one_process_binds_the_others_know(path: Path) -> None:
    one, two = SharedSessions(path, 60), SharedSessions(path, 60)
    assert await one.owner(key("a")) is None
    await one.bind(key("a"), OWNER)
    assert await two.owner(key("a")) == OWNER
    await two.bind(key("a"), OTHER)
    assert await one.owner(key("a")) == OTHER
    await one.close()
    assert await two.owner(key("a")) == OTHER


async def test_the_longest_name_that_an_engine_may_have_is_kept(path: Path) -> None:
    (engine,) = router_settings({"workers": [{"url": "http://h:1", "name": "a" * 48}]}).workers
    with pytest.raises(ConfigurationError):
        router_settings({"workers": [{"url": "http://h:1", "name": "a" * 49}]})
    owner = SessionOwner(engine.name or "", uuid.uuid4().hex, 9999)
    sessions = SharedSessions(path, 60)
    sessions.keep(key("a"), owner)
    assert sessions.find(key("a")) == owner


@pytest.mark.parametrize("other", [key("A"), key("a "), key("a", tenant="u"), key("a", model="n"), key("", model="ma")])
def test_keys_are_equal_only_to_themselves(path: Path, other: SessionKey) -> None:
    sessions = SharedSessions(path, 60)
    sessions.keep(key("a"), OWNER)
    assert sessions.find(other) is None


def test_idle_sessions_are_forgotten_and_used_ones_are_not(path: Path) -> None:
    clock = Clock()
    sessions = SharedSessions(path, 60, clock)
    sessions.keep(key("idle"), OWNER)
    sessions.keep(key("used"), OWNER)
    for _ in range(2):
        clock.now += 40
        assert sessions.find(key("used")) == OWNER
    assert sessions.find(key("idle")) is None
    clock.now += 79
    assert sessions.find(key("used")) is None


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    clock = Clock()
    SharedSessions.create(tmp_path / "s", 4)
    sessions = SharedSessions(tmp_path / "s", 60, clock)
    for number in range(8):
        clock.now += 1
        sessions.keep(key(str(number)), OWNER)
    clock.now += 12
    assert sessions.find(key("0")) == OWNER
    sessions.keep(key("new"), OTHER)
    found = [name for name in "01234567" if sessions.find(key(name))]
    assert found == list("0234567")
    assert sessions.find(key("new")) == OTHER


def test_all_that_were_asked_for_are_kept_and_a_flood_takes_no_more(path: Path) -> None:
    size, sessions = path.stat().st_size, SharedSessions(path, 60)
    for number in range(1_000):
        sessions.keep(key(str(number)), OWNER)
    kept = sum(sessions.find(key(str(number))) is not None for number in range(1_000))
    assert kept > 980
    for number in range(20_000):
        sessions.keep(key(f"flood-{number}"), OWNER)
    assert sum(sessions.find(key(f"flood-{number}")) is not None for number in range(20_000)) <= 2_000
    assert path.stat().st_size == size <= 2_000 * 128


def test_a_session_bound_again_stands_once(tmp_path: Path) -> None:
    SharedSessions.create(tmp_path / "s", 4)
    sessions = SharedSessions(tmp_path / "s", 60)
    for number in range(8):
        sessions.keep(key(str(number)), OWNER)
    for _ in range(20):
        sessions.keep(key("3"), OTHER)
    assert all(sessions.find(key(name)) for name in "01234567")


def test_an_owner_of_too_long_a_name_is_not_kept_rather_than_cut(path: Path) -> None:
    sessions = SharedSessions(path, 60)
    for length in (20, 80, 81, 200):
        owner = SessionOwner("decoder-0", "e" * length, 0)
        sessions.keep(key(str(length)), owner)
        assert sessions.find(key(str(length))) == (owner if length <= 80 else None)
    sessions.keep(key("20"), owner)
    assert sessions.find(key("20")) is None, "who was the owner before is so no more"


def test_what_is_half_written_is_not_read(path: Path) -> None:
    sessions = SharedSessions(path, 60)
    sessions.keep(key("a"), OWNER)
    whole = path.read_bytes()
    at = whole.index(b"decoder-0")
    for place, byte in ((at, b"x"), (at + 8, b"1"), (at - 2, b"\0")):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(byte)
        assert sessions.find(key("a")) is None
        with path.open("r+b") as file:
            file.write(whole)
        assert sessions.find(key("a")) == OWNER


SECONDS, FEWEST = 2.0, 1_000


def hammer(path: Path, seed: int, wrong: multiprocessing.Queue[str]) -> None:
    """Binds and asks for few sessions at once, of which each has owners of its own name."""
    sessions, chance = SharedSessions(path, 60), random.Random(seed)
    end, found = time.monotonic() + SECONDS, 0
    while time.monotonic() < end or found < FEWEST:
        name = str(chance.randrange(40))
        if chance.random() < 0.5:
            sessions.keep(key(name), SessionOwner(f"decoder-{name}", "e" * chance.randrange(40), chance.randrange(9)))
        owner = sessions.find(key(name))
        found += owner is not None
        if owner is not None and (owner.worker != f"decoder-{name}" or set(owner.epoch) - {"e"}):
            wrong.put(f"{name} has {owner}")
    wrong.put(f"found {found}")


def test_processes_that_write_at_once_tell_nothing_wrong(tmp_path: Path) -> None:
    path = tmp_path / "sessions"
    SharedSessions.create(path, 8)
    context = multiprocessing.get_context("spawn")
    said: multiprocessing.Queue[str] = context.Queue()
    processes = [context.Process(target=hammer, args=(path, seed, said)) for seed in range(3)]
    for process in processes:
        process.start()
    told = [said.get(timeout=250) for _ in processes]
    for process in processes:
        process.join()
    assert all(re.fullmatch(r"found \d+", one) for one in told), told
    assert said.empty()


def test_a_router_looks_up_in_the_table_at_once(path: Path) -> None:
    engines, sessions = [prefiller(), decoder()], SharedSessions(path, 60)
    assert RouterApp(settings_for(engines), FakeUpstream(engines), sessions).sessions is sessions
