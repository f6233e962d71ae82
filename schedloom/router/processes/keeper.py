"""The sessions of a router with several processes: kept by the supervisor, asked for through a socket.

Questions and answers are lines of JSON; answers come in the order of the questions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson

from schedloom.core.routing import SessionOwner
from schedloom.router.sessions import SessionKey, SessionStore

_MOST_BYTES = 64 * 1024


class Keeper:
    """Answers for ``store`` at the socket ``path``: ``async with Keeper(store, path): ...``."""

    def __init__(self, store: SessionStore, path: Path) -> None:
        self._store = store
        self._path = path
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self._path))

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError):
            async for lines in _lines(reader):
                answers = [orjson.dumps(await self._answer(*orjson.loads(line))) + b"\n" for line in lines]
                writer.write(b"".join(answers))
                await writer.drain()
        self._writers.discard(writer)
        writer.close()

    async def _answer(self, what: str, digest: str, owner: list[Any] | None) -> list[Any] | None:
        key = SessionKey("", "", digest)
        if what == "owner":
            found = await self._store.owner(key)
            return None if found is None else _listed(found)
        if owner is None:
            await self._store.release(key)
        else:
            await self._store.bind(key, SessionOwner(*owner))
        return None


class KeptSessions:
    """The supervisor's sessions, as one of the processes sees them. Raises OSError when nobody answers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._asked: deque[asyncio.Future[list[Any] | None]] = deque()
        self._questions: list[bytes] = []
        self._connecting = asyncio.Lock()

    async def owner(self, key: SessionKey) -> SessionOwner | None:
        found = await self._ask("owner", key, None)
        return None if found is None else SessionOwner(*found)

    async def bind(self, key: SessionKey, owner: SessionOwner) -> None:
        await self._ask("bind", key, _listed(owner))

    async def release(self, key: SessionKey) -> None:
        await self._ask("bind", key, None)

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)

    async def _ask(self, what: str, key: SessionKey, owner: list[Any] | None) -> list[Any] | None:
        writer = self._writer or await self._connected()
        answer: asyncio.Future[list[Any] | None] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._questions.append(orjson.dumps([what, key.digest(), owner]) + b"\n")
        if len(self._questions) == 1:
            asyncio.get_running_loop().call_soon(self._send, writer)
        return await answer

    def _send(self, writer: asyncio.StreamWriter) -> None:
        """All that was asked in one round of the event loop."""
        questions, self._questions = self._questions, []
        writer.write(b"".join(questions))

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._connecting:
            if self._writer is None:
                reader, self._writer = await asyncio.open_unix_connection(str(self._path))
                self._listening = asyncio.create_task(self._listen(reader, self._writer))
            return self._writer

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                async for lines in _lines(reader):
                    for line in lines:
                        answer = self._asked.popleft()
                        if not answer.done():
                            answer.set_result(orjson.loads(line))
        finally:
            self._writer = None
            writer.close()
            self._fail_all()

    def _fail_all(self) -> None:
        while self._asked:
            answer = self._asked.popleft()
            if not answer.done():
                answer.set_exception(ConnectionResetError("the supervisor closed the connection"))


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[list[bytes]]:
    """Whole lines, as many at once as have come."""
    rest = b""
    while data := await reader.read(_MOST_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        yield lines


def _listed(owner: SessionOwner) -> list[Any]:
    return [owner.worker, owner.epoch, owner.rank]
