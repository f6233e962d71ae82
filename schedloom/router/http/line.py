"""The line to a client, on which an answer is written as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from starlette.types import Message, Receive, Scope, Send

from schedloom.router.http.upstream import Sink, headers_in

LINE = "schedloom.line"
"""Where a server puts a ``Line`` of its own in a scope: then nothing is awaited for what can be written at once."""


class ClientGone(Exception):
    """The client closed its connection."""


class Line(Protocol):
    """One answer to one client. What is written after its end, or to a client that has left, is dropped.

    ``task`` is where it is made.
    """

    task: asyncio.Task[Any]

    def arrived(self, limit: int) -> bytes | None:
        """The whole body, where it is there and has at most ``limit`` bytes; otherwise it is to be received."""
        ...

    def start(self, status: int, lines: bytes, framed: bool) -> None:
        """With headers as they are sent; ``framed`` tells whether they say how long the answer is."""
        ...

    def write(self, data: bytes) -> bool:
        """Returns whether more is taken at once; otherwise ``drained`` is to be awaited first."""
        ...

    def chunk_writer(self) -> Sink | None:
        """What writes further data, framed already as HTTP/1.1 frames chunks, until the end. None where an answer is
        not framed so.
        """
        ...

    def end(self, data: bytes = b"") -> bool:
        """Likewise, and nothing follows."""
        ...

    async def drained(self) -> None: ...

    def watched_by(self, on_lost: Callable[[], None] | None) -> bool:
        """Call ``on_lost`` when the client leaves, instead of whatever was to be called; false when it has left."""
        ...


class AsgiLine:
    """A ``Line`` over what any ASGI server offers."""

    def __init__(self, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None, "an ASGI application is called in a task"
        self.task = task
        self._receive = receive
        self._send = send
        self._messages: list[Message] = []
        self._watcher: asyncio.Task[None] | None = None

    def arrived(self, limit: int) -> bytes | None:
        return None

    def start(self, status: int, lines: bytes, framed: bool) -> None:
        self._messages.append({"type": "http.response.start", "status": status, "headers": headers_in(lines)})

    def write(self, data: bytes) -> bool:
        self._messages.append({"type": "http.response.body", "body": data, "more_body": True})
        return False

    def chunk_writer(self) -> Sink | None:
        return None

    def end(self, data: bytes = b"") -> bool:
        self._messages.append({"type": "http.response.body", "body": data})
        return False

    async def drained(self) -> None:
        while self._messages:
            await self._send(self._messages.pop(0))

    def watched_by(self, on_lost: Callable[[], None] | None) -> bool:
        if self._watcher is not None:
            self._watcher.cancel()
        self._watcher = None if on_lost is None else asyncio.ensure_future(self._watch(on_lost))
        return True

    async def _watch(self, on_lost: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        on_lost()


def line_of(scope: Scope, receive: Receive, send: Send) -> Line:
    line: Line = scope.get(LINE) or AsgiLine(receive, send)
    return line
