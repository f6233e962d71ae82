"""An HTTP/1.1 server for one ASGI application."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Final

from starlette.types import ASGIApp

from schedloom.router.http.clients import Clients, Limits
from schedloom.router.http.protocol import ClientConnection

log = logging.getLogger(__name__)

BACKLOG: Final = 4096
"""How many connections may wait in the kernel's line."""

_AS_MANY_AS_MAY_BE: Final = "there are %d, for half of the files that may be open; raise that limit (ulimit -n)"
_PAUSE = 0.02
_LAST_WORDS_SECONDS = 1.0
_ACCEPT: Final = 32
_REST_SECONDS: Final = 0.5
_QUIET_SECONDS: Final = 60.0


class Server:
    """Serves ``app`` on a socket that is bound, from ``start`` to ``stop``."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def start(self, listener: socket.socket) -> None:
        self._clients = clients = Clients(self._app, self._limits)
        self._acceptor = _Acceptor(listener, clients)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        self._acceptor.open()

    @property
    def under_way(self) -> int:
        """How many requests are."""
        return len(self._clients.under_way)

    async def stop(self, grace_seconds: float) -> int:
        """Take no new requests; those under way may finish within ``grace_seconds``, and are cancelled then. Returns
        how many were.
        """
        self._acceptor.close()
        self._clients.leave()
        await self._until_empty(grace_seconds)
        late = tuple(self._clients.under_way)
        for exchange in late:
            exchange.task.cancel()
        await self._until_empty(_LAST_WORDS_SECONDS)
        for connection in tuple(self._clients.connections):
            connection.transport.abort()
        return len(late)

    async def _until_empty(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (self._clients.connections or self._clients.under_way) and loop.time() < end:
            await asyncio.sleep(_PAUSE)


class _Acceptor:
    """Accepts connections, some dozens in a round of the event loop.

    The loop's own server may take a single one in each round (libuv since 1.47), so that with some hundreds of busy
    connections the next hundred are let in over seconds.
    """

    def __init__(self, listener: socket.socket, clients: Clients) -> None:
        self._listener = listener
        self._clients = clients
        self._loop = asyncio.get_running_loop()
        self._coming: set[asyncio.Task[object]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._quiet_until = 0.0

    def open(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPT):
            if len(self._clients.connections) + len(self._coming) >= self._clients.limits.most_connections:
                return self._rest(_AS_MANY_AS_MAY_BE % self._clients.limits.most_connections)
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                return self._rest(error.strerror)
            self._let_in(connection)

    def _let_in(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made = self._loop.connect_accepted_socket(lambda: ClientConnection(self._clients), connection)
        task = self._loop.create_task(made)
        self._coming.add(task)
        task.add_done_callback(self._coming.discard)

    def _rest(self, reason: str | None) -> None:
        """There are no files left, or no memory: those who wait stay in the kernel's line. Told once in a minute."""
        if self._loop.time() >= self._quiet_until:
            self._quiet_until = self._loop.time() + _QUIET_SECONDS
            log.error("no more connections can be accepted now: %s", reason)
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(_REST_SECONDS, self.open)
