"""One request of a client and its answer, for an ASGI application: as ASGI has it, and as a ``Line``."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

import httptools
from starlette.types import ASGIApp, Message

from schedloom.router.failures import error_body
from schedloom.router.http.chunks import chunk_of
from schedloom.router.http.line import LINE
from schedloom.router.http.upstream import Header, Sink, lines_of

if TYPE_CHECKING:
    from schedloom.router.http.protocol import ClientConnection

log = logging.getLogger(__name__)

_STATUS_LINES = {one.value: f"HTTP/1.1 {one.value} {one.phrase}\r\n".encode() for one in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_DISCONNECT: Message = {"type": "http.disconnect"}
_BODILESS = (204, 304)


class ClientExchange:
    """A request as far as it has arrived, and its answer as far as it is written.

    Raises httptools.HttpParserError for a ``target`` that is none.
    """

    __slots__ = (
        "_chunked",
        "_complete",
        "_connection",
        "_ended",
        "_gone",
        "_head",
        "_headers",
        "_invited",
        "_keep",
        "_method",
        "_on_lost",
        "_parts",
        "_path",
        "_query",
        "_silent",
        "_told",
        "_waiter",
        "started",
        "task",
    )
    task: asyncio.Task[None]

    def __init__(
        self, connection: ClientConnection, method: str, target: bytes, headers: list[Header], keep: bool
    ) -> None:
        self._connection = connection
        self._method = method
        self._path, self._query = _path_and_query(target)
        self._headers = headers
        self._keep = keep
        self._parts: list[bytes] = []
        self._complete = False
        self._told = False
        self._invited = False
        self._gone = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_lost: Callable[[], None] | None = None
        self._head = b""
        self.started = False
        self._chunked = False
        self._silent = method == "HEAD"
        self._ended = False

    async def run(self, app: ASGIApp) -> None:
        try:
            scope = {
                "type": "http",
                "http_version": "1.1",
                "method": self._method,
                "path": self._path,
                "query_string": self._query,
                "headers": self._headers,
                LINE: self,
            }
            await app(scope, self.receive, self.send)
        except Exception:
            log.exception("a request ended in an unforeseen error")
        finally:
            self._connection.finished(self)
            if not (self._ended or self._gone):
                self._conclude()

    def _conclude(self) -> None:
        if self.started:
            self._connection.close()
        else:
            body = error_body(500, "The router failed.", "internal_error")
            self.start(500, b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body), framed=True)
            self.end(body)

    # ASGI

    async def receive(self) -> Message:
        if self._told:
            await self._until(lambda: self._gone or self._ended)
            return _DISCONNECT
        if not self._parts and not self._complete and not self._gone:
            self._invite()
            await self._until(lambda: self._parts or self._complete or self._gone)
        if self._gone and not self._complete:
            return _DISCONNECT
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._invited = True
        self._told = self._complete
        return {"type": "http.request", "body": body, "more_body": not self._complete}

    def _invite(self) -> None:
        """Tell a client that waits for it to go on with the body, unless there is some of it by now."""
        expects = (name == b"expect" and value.lower() == b"100-continue" for name, value in self._headers)
        if not self._invited and any(expects):
            self._connection.write(_CONTINUE)
        self._invited = True

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = message.get("headers", ())
            framed = any(name == b"content-length" for name, _ in headers)
            self.start(message["status"], lines_of(headers), framed)
        else:
            write = self.write if message.get("more_body", False) else self.end
            if not write(message.get("body", b"")):
                await self.drained()

    async def _until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    # Line

    def arrived(self, limit: int) -> bytes | None:
        parts = self._parts
        if not self._complete or self._told or len(parts) != 1 or len(parts[0]) > limit:
            return None
        self._told = True
        return parts.pop()

    def start(self, status: int, lines: bytes, framed: bool) -> None:
        self.started = True
        if status in _BODILESS:
            framed = self._silent = True
        end = b"\r\n"
        if not self._keep:
            end = b"connection: close\r\n\r\n"
        elif not framed:
            self._chunked = True
            end = b"transfer-encoding: chunked\r\n\r\n"
        self._head = (_STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status) + lines + end

    def write(self, data: bytes) -> bool:
        connection = self._connection
        if not (data or self._head) or self._gone or self._ended:
            return connection.writable
        if self._chunked and data:
            data = chunk_of(data)
        if self._head:
            data, self._head = (self._head if self._silent else self._head + data), b""
        elif self._silent:
            return connection.writable
        return connection.write(data)

    def chunk_writer(self) -> Sink | None:
        is_in_chunks = self._chunked and not (self._head or self._silent or self._ended)
        return self._connection.write if is_in_chunks else None

    def end(self, data: bytes = b"") -> bool:
        if self._gone or self._ended:
            return True
        if self._chunked:
            data = b"%b0\r\n\r\n" % chunk_of(data) if data else b"0\r\n\r\n"
        self._ended = True
        data = self._head if self._silent else self._head + data
        if data:
            self._connection.write(data)
        if self._waiter is not None:
            self._wake()
        self._connection.answered(self._keep)
        return self._connection.writable

    async def drained(self) -> None:
        await self._connection.drained()

    def watched_by(self, on_lost: Callable[[], None] | None) -> bool:
        self._on_lost = on_lost
        return not self._gone

    # Called by the connection.

    def body_arrived(self, data: bytes) -> None:
        if not self._ended:
            self._parts.append(data)
            if self._waiter is not None:
                self._wake()

    def complete(self) -> None:
        self._complete = True
        if self._waiter is not None:
            self._wake()

    def lost(self) -> None:
        self._gone = True
        self._wake()
        if self._on_lost is not None:
            self._on_lost()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@functools.lru_cache(maxsize=64)
def _path_and_query(target: bytes) -> tuple[str, bytes]:
    path, _, query = target.partition(b"?")
    if not path.startswith(b"/"):
        parts = httptools.parse_url(target)
        path, query = parts.path or b"/", parts.query or b""
    return (unquote_to_bytes(path) if path.count(b"%") else path).decode("latin-1"), query
