"""The router's HTTP client: keep-alive connections to engines, nothing between it and the sockets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ssl
from collections import defaultdict
from typing import NamedTuple
from urllib.parse import urlsplit

from schedloom.router.http.connection import Idle, UpstreamConnection
from schedloom.router.http.outbox import Outbox
from schedloom.router.http.upstream import BrokenOff, ConnectFailed, TooLate, Unanswered, UpstreamError, UpstreamRequest
from schedloom.router.http.upstream_exchange import UpstreamExchange

_IDLE_SECONDS = 4.0
"""Engines close a connection that was idle for five seconds; leave before they do."""

_HANDOFF_IDLE_SECONDS = 1.0
"""Long before they do, for a request that is never sent twice."""

_UNANSWERED = (errno.ETIMEDOUT, errno.EHOSTUNREACH)


class _Origin(NamedTuple):
    host: str
    port: int
    tls: bool
    prefix: str
    host_header: bytes


@functools.lru_cache(maxsize=1024)
def _parse(origin: str) -> _Origin:
    parts = urlsplit(origin)
    tls = parts.scheme == "https"
    host = parts.hostname or ""
    port = parts.port or (443 if tls else 80)
    shown = f"[{host}]" if ":" in host else host
    return _Origin(host, port, tls, parts.path.rstrip("/"), f"{shown}:{port}".encode())


class HttpUpstream:
    """``Upstream`` over sockets, one request at a time on each connection.

    A kept connection that the engine closed before a byte of answer is replaced by a fresh one, once.
    """

    def __init__(self, connect_timeout: float = 5.0) -> None:
        self._connect_timeout = connect_timeout
        self._idle: dict[str, Idle] = defaultdict(Idle)
        self._open: set[UpstreamConnection] = set()
        self._opening: set[asyncio.Task[UpstreamConnection]] = set()
        self._outbox = Outbox()

    async def send(self, request: UpstreamRequest) -> UpstreamExchange:
        kept = self._take_idle(request)
        while True:
            exchange = self._dispatch(kept or await self._connect(request), request)
            try:
                while not exchange.has_head:
                    await exchange.news()
                return exchange
            except BaseException as error:
                exchange.close()
                if kept is None or not _may_be_repeated(exchange, request, error):
                    raise
            kept = None

    def forget(self, origin: str) -> None:
        for connection in tuple(self._idle.pop(origin, ())):
            connection.abort()

    def heard_at(self, origin: str) -> float:
        heard = [one.heard_at for one in self._open if one.origin == origin]
        return max([self._idle[origin].heard_at, *heard]) if origin in self._idle else max(heard, default=0.0)

    def give_up(self, origin: str) -> int:
        return sum([one.give_up_waiting() for one in tuple(self._open) if one.origin == origin])

    async def close(self) -> None:
        for opening in tuple(self._opening):
            opening.cancel()
        for connection in tuple(self._open):
            connection.abort()

    def _dispatch(self, connection: UpstreamConnection, request: UpstreamRequest) -> UpstreamExchange:
        if connection.transport.is_closing():
            raise ConnectFailed(f"{request.origin} closed the connection as it was made")
        if request.dispatch_by is not None and (now := connection.loop.time()) >= request.dispatch_by:
            connection.rest(now)
            raise TooLate(f"{request.origin} was not reached in time")
        line, lines = _request_line(request.origin, request.method, request.path), b"".join(request.lines)
        head = b"%b%bcontent-length: %d\r\n\r\n" % (line, lines, len(request.body))
        return connection.send(request, head)

    def _take_idle(self, request: UpstreamRequest) -> UpstreamConnection | None:
        idle = self._idle[request.origin]
        longest = _IDLE_SECONDS if request.dispatch_by is None else _HANDOFF_IDLE_SECONDS
        while idle:
            connection, _ = idle.popitem()
            rested = connection.loop.time() - connection.idle_since
            if rested < longest and not connection.transport.is_closing():
                return connection
            connection.abort()
        return None

    async def _connect(self, request: UpstreamRequest) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        allowed = self._connect_timeout
        if request.dispatch_by is not None:
            allowed = min(allowed, request.dispatch_by - loop.time())
        opening = loop.create_task(self._open_connection(request.origin))
        try:
            await asyncio.wait({opening}, timeout=allowed)
        except asyncio.CancelledError:
            if request.settle_seconds:
                self._dispatch_when_open(opening, request)
            else:
                _give_up(opening)
            raise
        if opening.done() and not opening.cancelled():
            return opening.result()
        _give_up(opening)
        if request.dispatch_by is not None and loop.time() >= request.dispatch_by:
            raise TooLate(f"{request.origin}: not connected in time")
        raise Unanswered(f"{request.origin}: no connection within {allowed:g} s")

    def _dispatch_when_open(self, opening: asyncio.Task[UpstreamConnection], request: UpstreamRequest) -> None:
        def dispatch(opened: asyncio.Task[UpstreamConnection]) -> None:
            self._opening.discard(opened)
            with contextlib.suppress(asyncio.CancelledError, UpstreamError):
                self._dispatch(opened.result(), request).close()

        self._opening.add(opening)
        opening.add_done_callback(dispatch)

    async def _open_connection(self, origin: str) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        connection = UpstreamConnection(loop, origin, self._idle[origin], self._open, self._outbox)
        address = _parse(origin)
        try:
            await loop.create_connection(
                lambda: connection,
                address.host,
                address.port,
                ssl=_tls_context() if address.tls else None,
            )
        except OSError as error:
            kind = Unanswered if error.errno in _UNANSWERED else ConnectFailed
            raise kind(f"{origin}: {error.strerror or error}") from error
        except asyncio.CancelledError:
            connection.give_up()
            raise
        return connection


def _give_up(opening: asyncio.Task[UpstreamConnection]) -> None:
    """Nobody wants the connection any more, which may be there in the same instant."""
    opening.cancel()
    opening.add_done_callback(_close_opened)


def _close_opened(opening: asyncio.Task[UpstreamConnection]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().give_up()


def _may_be_repeated(exchange: UpstreamExchange, request: UpstreamRequest, error: BaseException) -> bool:
    """Whether an engine has but closed a connection that was kept. KV that was handed over may have been pulled."""
    return isinstance(error, BrokenOff) and not exchange.has_head and request.dispatch_by is None


@functools.cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()


@functools.lru_cache(maxsize=4096)
def _request_line(origin: str, method: str, path: str) -> bytes:
    """And the line behind it."""
    address = _parse(origin)
    return f"{method} {address.prefix}{path} HTTP/1.1\r\nhost: ".encode() + address.host_header + b"\r\n"
