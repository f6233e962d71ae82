"""The router's HTTP client: keep-alive connections to engines, nothing between it and the sockets."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from collections import defaultdict
from typing import NamedTuple
from urllib.parse import urlsplit

from schedloom.router.connection import Connection, Exchange
from schedloom.router.upstream import BrokenOff, ConnectFailed, TooLate, UpstreamError, UpstreamRequest

_IDLE_SECONDS = 4.0
"""Engines close a connection that was idle for five seconds; leave before they do."""

_HANDOFF_IDLE_SECONDS = 1.0
"""Long before they do, for a request that is never sent twice."""


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
        self._idle: dict[str, dict[Connection, None]] = defaultdict(dict)
        self._open: set[Connection] = set()
        self._opening: set[asyncio.Task[Connection]] = set()

    async def send(self, request: UpstreamRequest) -> Exchange:
        kept = self._take_idle(request.origin, _HANDOFF_IDLE_SECONDS if request.dispatch_by else _IDLE_SECONDS)
        if kept is not None:
            exchange = self._dispatch(kept, request)
            try:
                await exchange.head()
                return exchange
            except BrokenOff:
                # KV that was handed over may have been pulled: such a request is never sent twice.
                if exchange.started or request.dispatch_by is not None:
                    raise
        exchange = self._dispatch(await self._connect(request), request)
        await exchange.head()
        return exchange

    async def close(self) -> None:
        for opening in tuple(self._opening):
            opening.cancel()
        for connection in tuple(self._open):
            connection.abort()

    def _dispatch(self, connection: Connection, request: UpstreamRequest) -> Exchange:
        if request.dispatch_by is not None and connection.loop.time() >= request.dispatch_by:
            self._put_idle(request.origin, connection)
            raise TooLate(f"{request.origin} was not reached in time")
        return connection.send(request, _head(request))

    def _take_idle(self, origin: str, longest: float) -> Connection | None:
        idle = self._idle[origin]
        while idle:
            connection, _ = idle.popitem()
            if connection.is_open and connection.loop.time() - connection.idle_since < longest:
                return connection
            connection.abort()
        return None

    def _put_idle(self, origin: str, connection: Connection) -> None:
        connection.idle_since = connection.loop.time()
        self._idle[origin][connection] = None

    def _forget(self, origin: str, connection: Connection) -> None:
        self._idle[origin].pop(connection, None)
        self._open.discard(connection)

    async def _connect(self, request: UpstreamRequest) -> Connection:
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
                opening.cancel()
            raise
        if opening.done() and not opening.cancelled():
            return opening.result()
        opening.cancel()
        if request.dispatch_by is not None and loop.time() >= request.dispatch_by:
            raise TooLate(f"{request.origin}: not connected in time")
        raise ConnectFailed(f"{request.origin}: no connection within {allowed:g} s")

    def _dispatch_when_open(self, opening: asyncio.Task[Connection], request: UpstreamRequest) -> None:
        def dispatch(opened: asyncio.Task[Connection]) -> None:
            self._opening.discard(opened)
            with contextlib.suppress(asyncio.CancelledError, UpstreamError):
                self._dispatch(opened.result(), request).close()

        self._opening.add(opening)
        opening.add_done_callback(dispatch)

    async def _open_connection(self, origin: str) -> Connection:
        loop = asyncio.get_running_loop()
        on_idle = functools.partial(self._put_idle, origin)
        on_closed = functools.partial(self._forget, origin)
        address = _parse(origin)
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(loop, on_idle, on_closed),
                address.host,
                address.port,
                ssl=_tls_context() if address.tls else None,
            )
        except OSError as error:
            raise ConnectFailed(f"{origin}: {error.strerror or error}") from error
        self._open.add(connection)
        return connection


@functools.cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()


@functools.lru_cache(maxsize=4096)
def _request_line(origin: str, method: str, path: str) -> bytes:
    address = _parse(origin)
    return f"{method} {address.prefix}{path} HTTP/1.1\r\nhost: ".encode() + address.host_header


def _head(request: UpstreamRequest) -> bytes:
    lines = [_request_line(request.origin, request.method, request.path)]
    for name, value in request.headers:
        lines += (b"\r\n", name, b": ", value)
    lines.append(b"\r\ncontent-length: %d\r\n\r\n" % len(request.body))
    return b"".join(lines)
