"""The server's side of HTTP, with limits on what a client may send and how long it may take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from schedloom.router.dialect import DIALECTS
from schedloom.router.failures import busy, error_body
from schedloom.router.watch import CONNECTION

_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}
_HEAD = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
_BUSY = busy().body
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_BUSY), _BUSY)
)
_REFUSABLE = frozenset(path.encode() for path in DIALECTS)


class LimitedProtocol(HttpToolsProtocol):
    """Closes connections whose request is too long in its head (431), or too slow in its head or body (408).

    A request that arrives in one piece costs no timer. What engines would serve and ``may_come`` has no room for is
    refused (503) for a tenth of what it costs to serve it; then ``on_refused`` is called.
    """

    max_header_bytes = 64 * 1024
    header_seconds = 10.0
    body_seconds = 30.0
    may_come: Callable[[], bool] = staticmethod(lambda: True)
    on_refused: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._in_head = True
        self._in_body = False
        self._refusing = False
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._on_lost: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._allow(self.header_seconds, "headers")

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        super().connection_lost(exc)
        if self._on_lost is not None:
            self._on_lost()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_body:
            self._allow(self.body_seconds, "body")
        elif self._head_bytes > self.max_header_bytes:
            self._refuse_head()
        elif self._head_bytes:
            self._allow(self.header_seconds, "headers")

    def on_headers_complete(self) -> None:
        self._arrived()
        self._in_head, self._in_body = False, True
        received, self._head_bytes = self._head_bytes, 0
        if received > self.max_header_bytes and self._head_size() > self.max_header_bytes:
            self._refuse_head()
        elif self._is_refusable() and not self.may_come():
            self._refusing = True
        else:
            self.scope[CONNECTION] = self  # type: ignore[literal-required]
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing() and not self._refusing:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._arrived()
        self._in_head, self._in_body = True, False
        if self._refusing:
            self._refuse_shortly()
        elif not self.transport.is_closing():
            super().on_message_complete()

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def watched_by(self, on_lost: Callable[[], None] | None) -> bool:
        self._on_lost = on_lost
        return not self.transport.is_closing()

    def _allow(self, seconds: float, part: str) -> None:
        if self._timer is None:
            message = f"The request's {part} took too long to arrive."
            self._timer = self.loop.call_later(seconds, self._refuse, 408, message, f"{part}_too_slow")

    def _arrived(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_refusable(self) -> bool:
        """Not in the midst of another answer, nor where a client waits to be told to go on."""
        is_idle = self.cycle is None or self.cycle.response_complete
        is_for_engines = self.url in _REFUSABLE and self.parser.get_method() == b"POST"
        return is_for_engines and is_idle and not self.expect_100_continue

    def _refuse_shortly(self) -> None:
        self._refusing = False
        self.on_refused()
        self.transport.write(_REFUSAL)
        if self.parser.should_keep_alive():
            idle = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
            self.timeout_keep_alive_task = idle
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg, "invalid_http")

    def _refuse_head(self) -> None:
        self._refuse(431, "The request's headers are too long.", "headers_too_long")

    def _refuse(self, status: int, message: str, code: str) -> None:
        self._arrived()
        if not self.transport.is_closing():
            body = error_body(status, message, code)
            self.transport.write(_HEAD % (status, _REASONS[status], len(body)) + body)
            self.transport.close()
