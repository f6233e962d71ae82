"""A2, X8: sessions kept outside the router: shared, bounded in time, and never the reason of an error."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schedloom.core.errors import ConfigurationError
from schedloom.core.routing import SessionOwner
from schedloom.router.app import RouterApp
from schedloom.router.fleet.roster import Roster
from schedloom.router.laboratory.client import Client
from schedloom.router.serve import tell_doubts
from schedloom.router.sessions import patience
from schedloom.router.sessions.patience import REST_SECONDS, PatientSessions
from schedloom.router.sessions.redis import RedisSessions
from schedloom.router.sessions.store import MemorySessions, SessionKey
from schedloom.router.settings import WorkerSettings, router_settings
from schedloom.router.telemetry.metrics import Metrics
from tests.router.clock import Clock
from tests.router.conftest import settings_for
from tests.router.fakes import FakeUpstream, decoder, prefiller
from tests.router.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio

KEY = SessionKey("tenant", "model", "session")
OWNER, OTHER = SessionOwner("decoder-0", "e1", 0), SessionOwner("decoder-1", "e1", 2)
ENGINES = [WorkerSettings(url=f"http://{name}:1", role="decode") for name in ("d0", "d1")]
SERVER = shutil.which("valkey-server") or shutil.which("redis-server")


class Failing:
    """A store that fails, or hangs, while it is told to."""

    trouble: Exception | asyncio.Event | None = None
    asked = 0

    def __init__(self, clock: Clock) -> None:
        store = MemorySessions(10, 60, clock)
        self._find, self.bind, self.close = store.find, store.bind, store.close

    async def owner(self, key: SessionKey) -> SessionOwner | None:
        self.asked += 1
        if isinstance(self.trouble, Exception):
            raise self.trouble
        if self.trouble is not None:
            await self.trouble.wait()
        return self._find(key)


async def test_what_a_store_fails_to_tell_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    clock, metrics = Clock(), Metrics()
    store = Failing(clock)
    sessions = PatientSessions(store, metrics, clock)
    await sessions.bind(KEY, OWNER)
    assert await sessions.owner(KEY) == OWNER
    store.trouble = OSError("gone")
    assert [await sessions.owner(KEY) for _ in range(5)] == [None] * 5
    assert store.asked == 2
    clock.now += REST_SECONDS
    assert await sessions.owner(KEY) is None and store.asked == 3
    clock.now += REST_SECONDS
    store.trouble = None
    assert await sessions.owner(KEY) == OWNER
    assert len(caplog.records) == 1
    assert metrics.registry.get_sample_value("schedloom_router_session_store_errors_total") == 2


async def test_a_store_that_hangs_is_not_waited_for() -> None:
    clock = Clock()
    store = Failing(clock)
    store.trouble = asyncio.Event()
    asked = PatientSessions(store, Metrics(), clock).owner(KEY)
    assert await asyncio.wait_for(asked, 100 * patience.PATIENCE_SECONDS) is None


async def test_without_its_store_a_router_serves_by_prefillers() -> None:
    engines = [prefiller(), decoder()]
    store = Failing(Clock())
    app = RouterApp(settings_for(engines), FakeUpstream(engines), store)
    await app.start()
    client = Client(app)
    decisions = []
    for trouble in (None, None, OSError("gone")):
        store.trouble = trouble
        received = await client.chat("s")
        assert received.status == 200
        decisions.append(received.decision)
    assert decisions == ["pd", "append", "pd"]
    await app.close()


async def test_a_start_says_once_that_its_store_fails(caplog: pytest.LogCaptureFixture) -> None:
    engines, store = [prefiller(), decoder()], Failing(Clock())
    store.trouble = OSError("gone")
    settings = settings_for(engines, session_store="redis://h:1")
    app = RouterApp(settings, FakeUpstream(engines), store)
    await app.start()
    await tell_doubts(settings, app)
    (said,) = [record for record in caplog.records if "the store of sessions fails" in record.message]
    assert said.levelname == "WARNING"
    assert (await Client(app).chat("s")).status == 200
    assert len([record for record in caplog.records if "the store of sessions fails" in record.message]) == 1
    await app.close()


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost", "memcached://x", "redis://h:99999"])
def test_an_address_of_something_else_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"session_store.*redis://host:port"):
        router_settings({"workers": [{"url": "http://h:1"}], "session_store": url})


def test_a_missing_client_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(ConfigurationError, match=r"schedloom\[sessions\]"):
        RedisSessions("redis://h:1", Roster(ENGINES), 60)


def test_a_digest_is_that_of_one_key() -> None:
    keys = [
        SessionKey("a", "b", "c"),
        SessionKey("ab", "", "c"),
        SessionKey("a", "bc", ""),
        SessionKey("\ud800", "", ""),
    ]
    assert len({key.digest() for key in keys}) == 4
    assert SessionKey("a", "b", "c").digest() == keys[0].digest()


class Server:
    """A real server at a socket in ``folder``."""

    def __init__(self, folder: Path) -> None:
        assert SERVER is not None
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        options = ["--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir", str(folder)]
        self.process = subprocess.Popen([SERVER, *options], stdout=subprocess.DEVNULL)

    def answers(self) -> bool:
        """Its socket is there a moment before anybody listens."""
        assert self.process.poll() is None
        with socket.socket(socket.AF_UNIX) as one:
            return one.connect_ex(str(self.socket)) == 0

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    if SERVER is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    server = Server(tmp_path)
    try:
        await until(server.answers)
        yield server
    finally:
        server.stop()


Connect = Callable[..., RedisSessions]


@pytest.fixture
async def connect(server: Server) -> AsyncIterator[Connect]:
    """What connects to the server is closed when a test has failed, too: the loop ends no sooner."""
    async with AsyncExitStack() as stack:

        def made(idle_seconds: float = 60, roster: Roster | None = None) -> RedisSessions:
            sessions = RedisSessions(server.url, roster or Roster(ENGINES), idle_seconds)
            stack.push_async_callback(sessions.close)
            return sessions

        yield made


async def test_a_server_keeps_the_sessions_of_all_routers(connect: Connect) -> None:
    one, two = connect(), connect()
    assert await one.owner(KEY) is None
    await one.bind(KEY, OWNER)
    assert await two.owner(KEY) == OWNER
    await two.bind(KEY, OTHER)
    assert await one.owner(KEY) == OTHER
    assert await one.owner(KEY._replace(tenant="another")) is None


async def test_an_owner_is_known_by_its_address_whatever_each_router_calls_it(connect: Connect) -> None:
    """A3: routers whose fleets changed at different times share what they have in common."""
    roster = Roster(ENGINES)
    one, other = connect(roster=roster), connect(roster=Roster(ENGINES[1:]))
    await one.bind(KEY, OTHER)
    assert await other.owner(KEY) == replace(OTHER, worker="decoder-0")
    await one.bind(KEY, OWNER)
    assert await other.owner(KEY) is None
    roster.renew(ENGINES[1:])
    assert await one.owner(KEY) is None
    await one.bind(KEY, OTHER)
    await one.bind(KEY, OWNER)
    assert await other.owner(KEY) == replace(OTHER, worker="decoder-0")


async def test_names_of_their_own_are_nothing_to_the_sessions_of_others(connect: Connect) -> None:
    named = [engine.model_copy(update={"name": f"gpu{place}"}) for place, engine in enumerate(ENGINES)]
    one, other = connect(), connect(roster=Roster(named))
    await one.bind(KEY, OTHER)
    assert await other.owner(KEY) == replace(OTHER, worker="gpu1")
    await other.bind(KEY, replace(OWNER, worker="gpu0"))
    assert await one.owner(KEY) == OWNER


async def test_idle_sessions_are_forgotten_and_used_ones_are_not(connect: Connect) -> None:
    sessions, idle = connect(idle_seconds=60), SessionKey("", "", "idle")
    server = sessions._client
    for key in (KEY, idle):
        await sessions.bind(key, OWNER)
    for name in await server.keys("*"):
        await server.pexpire(name, 30_000)  # as if half of the time had passed
    assert await sessions.owner(KEY) == OWNER
    left = {name: await server.pttl(name) for name in await server.keys("*")}
    assert [milliseconds > 30_000 for milliseconds in sorted(left.values())] == [False, True]
    brief = connect(idle_seconds=0.01)
    await brief.bind(idle, OWNER)
    for _ in range(1000):
        if len(await server.keys("*")) == 1:
            break
        await asyncio.sleep(0.01)
    assert await sessions.owner(idle) is None and await sessions.owner(KEY) == OWNER


async def test_no_session_id_is_kept_in_the_clear(connect: Connect) -> None:
    sessions = connect()
    await sessions.bind(KEY, OWNER)
    (name,) = await sessions._client.keys("*")
    assert not any(word in name.decode() for word in KEY)


async def test_two_routers_share_their_sessions_and_outlive_their_server(
    server: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", PATIENCE_SECONDS)
    engines = [prefiller(), decoder(0), decoder(1)]
    settings = settings_for(engines)
    stores = [connect(roster=Roster(settings.workers)) for _ in range(2)]
    apps = [RouterApp(settings, FakeUpstream(engines), store) for store in stores]
    for app in apps:
        await app.start()
    answers: list[Any] = [await Client(apps[turn % 2]).chat("s") for turn in range(4)]
    assert [one.decision for one in answers] == ["pd", "append", "append", "append"]
    assert len({one.headers["x-schedloom-decoder"] for one in answers}) == 1
    server.stop()
    last = await Client(apps[0]).chat("s")
    assert (last.status, last.decision) == (200, "pd")
    for app in apps:
        await app.close()
