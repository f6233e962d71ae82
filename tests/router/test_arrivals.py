"""Requests that come faster than they can be begun are held, served in a good order, and refused sparingly (R7, B9)."""

from __future__ import annotations

import asyncio
import errno
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from schedloom.router.http.arrivals import Arrivals
from schedloom.router.http.clients import Limits
from schedloom.router.http.protocol import ClientConnection
from schedloom.router.http.server import Server
from tests.router.conftest import Make
from tests.router.fakes import decoder, prefiller
from tests.router.sockets import served
from tests.router.test_server import echo
from tests.router.waiting import PATIENCE_SECONDS, in_one_of, until

pytestmark = pytest.mark.anyio

PLENTY = 1_000_000


class Comer:
    """A request, and what became of it."""

    def __init__(self, number: int, fates: list[tuple[str, int]]) -> None:
        self._number = number
        self._fates = fates

    def begin(self) -> None:
        self._fates.append(("begun", self._number))

    def turn_away(self) -> None:
        self._fates.append(("refused", self._number))


class Crowd:
    """Requests that come together, numbered in the order in which they came."""

    def __init__(self, many: int, room: int) -> None:
        self.room = room
        self.fates: list[tuple[str, int]] = []
        self.arrivals = Arrivals(lambda: self.room)
        self.comers = [Comer(number, self.fates) for number in range(many)]
        for comer in self.comers:
            if self.arrivals.may_begin():
                comer.begin()
            else:
                self.arrivals.hold(comer)

    async def a_round(self) -> list[tuple[str, int]]:
        """What it brings."""
        self.fates.clear()
        await asyncio.sleep(0)
        return list(self.fates)


def begun(*numbers: int) -> list[tuple[str, int]]:
    return [("begun", number) for number in numbers]


async def test_a_few_dozen_begin_in_each_round_in_their_order() -> None:
    crowd = Crowd(100, PLENTY)
    assert crowd.fates == begun(*range(32))
    for first in (32, 64):
        assert await crowd.a_round() == begun(*range(first, first + 32))
    assert await crowd.a_round() == begun(*range(96, 100))
    assert await crowd.a_round() == []
    assert crowd.arrivals.may_begin()


async def test_whoever_comes_while_others_are_held_is_behind_them() -> None:
    crowd = Crowd(40, PLENTY)
    late = Comer(40, crowd.fates)
    assert not crowd.arrivals.may_begin()
    crowd.arrivals.hold(late)
    assert await crowd.a_round() == begun(*range(32, 41))
    await crowd.a_round()
    assert crowd.arrivals.may_begin()


async def test_beyond_the_room_the_newest_begin_and_few_of_the_oldest_are_refused() -> None:
    crowd = Crowd(200, room=50)
    oldest = [("refused", number) for number in range(32, 36)]
    assert await crowd.a_round() == oldest + begun(*range(199, 167, -1))
    oldest = [("refused", number) for number in range(36, 40)]
    assert await crowd.a_round() == oldest + begun(*range(167, 135, -1))
    crowd.room = PLENTY
    assert await crowd.a_round() == begun(*range(40, 72))


async def test_nobody_is_refused_who_has_room() -> None:
    crowd = Crowd(32 + 50, room=50)
    assert await crowd.a_round() == begun(*range(32, 64))


async def test_whoever_leaves_is_not_served() -> None:
    crowd = Crowd(36, PLENTY)
    for number in (0, 33):
        crowd.arrivals.forget(crowd.comers[number])
    assert await crowd.a_round() == begun(32, 34, 35)


async def test_at_the_end_all_begin() -> None:
    crowd = Crowd(100, PLENTY)
    crowd.arrivals.empty()
    assert sorted(crowd.fates) == begun(*range(100))


def post(body: bytes, path: bytes = b"/v1/completions") -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path, len(body), body)


@asynccontextmanager
async def crowded(many: int, **limits: Any) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    async with served(echo, limits=Limits(**limits)) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        pairs = [await asyncio.open_connection(host, int(port)) for _ in range(many)]
        yield pairs
        for _, writer in pairs:
            writer.close()


async def answers(reader: asyncio.StreamReader, many: int) -> list[bytes]:
    """The bodies of as many answers."""
    found = []
    for _ in range(many):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_SECONDS)
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        found.append(await reader.readexactly(length))
    return found


async def test_what_is_held_is_answered_in_whatever_pieces_it_came() -> None:
    """Whole, behind another on the same connection, in two pieces, and longer than what is read at once."""
    long = b"x" * 600_000
    async with crowded(150) as pairs:
        for number, (_, writer) in enumerate(pairs):
            body = b"%d" % number
            if number % 50 == 40:
                writer.write(post(body + long))
            elif number % 3 == 1:
                writer.write(post(body) + post(body + b"!"))
            elif number % 3 == 2:
                writer.write(post(body)[:-1])
            else:
                writer.write(post(body))
        await asyncio.sleep(0)
        for number, (_, writer) in enumerate(pairs):
            if number % 3 == 2 and number % 50 != 40:
                writer.write(b"%d" % (number % 10))
        for number, (reader, _) in enumerate(pairs):
            said = b"POST /v1/completions  %d" % number
            if number % 50 == 40:
                assert await answers(reader, 1) == [said + long]
            elif number % 3 == 1:
                assert await answers(reader, 2) == [said, said + b"!"]
            else:
                assert await answers(reader, 1) == [said]


async def test_what_is_not_for_engines_is_never_held() -> None:
    async with crowded(200) as pairs:
        for number, (_, writer) in enumerate(pairs):
            writer.write(post(b"") if number < 199 else b"GET /health HTTP/1.1\r\n\r\n")
        first = [asyncio.create_task(answers(reader, 1)) for reader, _ in pairs]
        await first[199]
        assert sum(task.done() for task in first) < 150
        await asyncio.gather(*first)


@in_one_of(5)
async def test_a_held_request_is_not_taken_for_a_slow_one_nor_its_connection_for_an_idle_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Arrivals, "may_begin", lambda _: False)
    monkeypatch.setattr(Arrivals, "_come_round", lambda _: None)
    connections: list[ClientConnection] = []
    monkeypatch.setattr(Arrivals, "hold", lambda _, arrival: connections.append(arrival))
    async with crowded(1, header_seconds=0.05, body_seconds=0.05, idle_seconds=0.05) as [(reader, writer)]:
        for number in range(2):
            writer.write(post(b"%d" % number))
            await asyncio.sleep(0.2)
            connections[number].begin()
            assert await answers(reader, 1) == [b"POST /v1/completions  %d" % number]


async def test_what_is_turned_away_is_refused_and_its_connection_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arrivals, "may_begin", lambda _: False)
    connections: list[ClientConnection] = []
    monkeypatch.setattr(Arrivals, "hold", lambda _, arrival: connections.append(arrival))
    async with crowded(1) as [(reader, writer)]:
        writer.write(post(b"1"))
        await until(lambda: len(connections) == 1)
        connections[0].turn_away()
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 503")
        await reader.readuntil(b"}}")
        writer.write(post(b"2"))
        await until(lambda: len(connections) == 2)
        connections[1].begin()
        assert await answers(reader, 1) == [b"POST /v1/completions  2"]


async def test_a_server_that_is_told_to_end_answers_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arrivals, "may_begin", lambda _: False)
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(echo, Limits())
    await server.start(listener)
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(post(b"1"))
    await until(lambda: server._clients.arrivals._held)
    await server.stop(grace_seconds=PATIENCE_SECONDS)
    assert await answers(reader, 1) == [b"POST /v1/completions  1"]
    writer.close()


async def test_many_connections_are_let_in_within_a_few_rounds() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(echo, Limits())
    await server.start(listener)
    clients = [socket.create_connection(listener.getsockname()) for _ in range(300)]
    rounds = 0
    while len(server._clients.connections) < 300 and rounds < 1000:
        await asyncio.sleep(0)
        rounds += 1
    for client in clients:
        client.close()
    await server.stop(0)
    assert rounds < 60


class FullListener:
    """A socket that listens, of a process that has no files left for a while."""

    def __init__(self, listener: socket.socket, times: int) -> None:
        self._listener = listener
        self._times = times

    def accept(self) -> Any:
        self._times -= 1
        if self._times >= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


async def test_without_files_left_whoever_comes_waits_and_it_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(echo, Limits())
    full: Any = FullListener(listener, times=2)
    await server.start(full)
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(post(b"1"))
    assert await answers(reader, 1) == [b"POST /v1/completions  1"]
    writer.close()
    await server.stop(0)
    assert caplog.text.count("no more connections can be accepted now: Too many open files") == 1


async def test_whoever_leaves_while_held_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arrivals, "may_begin", lambda _: False)
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(echo, Limits())
    await server.start(listener)
    _, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(post(b"1"))
    held = server._clients.arrivals._held
    await until(lambda: len(held) == 1)
    writer.close()
    await until(lambda: not held)
    await server.stop(0)


async def test_who_is_held_is_counted_among_those_who_wait(bench: Make) -> None:
    router = await bench(prefiller(), decoder())
    crowd = Crowd(2, PLENTY)
    for comer in crowd.comers:
        router.app.arrivals.hold(comer)
    await router.client.get("/metrics")
    assert router.count("waiting") == 2
    router.app.arrivals.empty()


async def test_clients_take_only_so_many_connections_and_whoever_comes_waits(caplog: pytest.LogCaptureFixture) -> None:
    async with crowded(3, most_connections=2) as pairs:
        for _, writer in pairs:
            writer.write(post(b"1"))
        for reader, _ in pairs[:2]:
            assert await answers(reader, 1) == [b"POST /v1/completions  1"]
        waiting = asyncio.create_task(answers(pairs[2][0], 1))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        pairs[0][1].close()
        assert await waiting == [b"POST /v1/completions  1"]
    assert (
        "no more connections can be accepted now: there are 2, for half of the files that may be open; raise"
        in caplog.text
    )


def test_a_router_takes_all_the_files_it_can_get_and_leaves_half_of_them_to_engines() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 400));"
        "from schedloom.router.serve import _files;"
        "print(_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["400", "400"]
