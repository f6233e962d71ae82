"""The server's side of HTTP, with limits on what a client may send before it is a request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from schedloom.router.failures import error_body

MAX_HEADER_BYTES = 64 * 1024
HEADER_SECONDS = 10.0

_REASONS = {408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class LimitedProtocol(HttpToolsProtocol):
    """Closes connections whose request head is too long (431) or too slow (408)."""

    max_header_bytes = MAX_HEADER_BYTES
    header_seconds = HEADER_SECONDS

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._await_head()
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self.max_header_bytes:
            self._refuse(431, "The request's headers are too long.", "headers_too_long")

    def on_headers_complete(self) -> None:
        self._head_is_there()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self.max_header_bytes:
            self._refuse(431, "The request's headers are too long.", "headers_too_long")
        else:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.transport.is_closing():
            super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(
                self.header_seconds, self._refuse, 408, "The request's headers took too long.", "headers_too_slow"
            )

    def _head_is_there(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, message: str, code: str) -> None:
        self._head_is_there()
        if self.transport.is_closing():
            return
        body = error_body(status, message, code)
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, _REASONS[status], len(body)) + body)
        self.transport.close()
