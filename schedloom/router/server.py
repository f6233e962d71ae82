"""An HTTP/1.1 server for one ASGI application."""

from __future__ import annotations

import asyncio
import socket

from starlette.types import ASGIApp

from schedloom.router.protocol import ClientConnection, Clients, Limits

_PAUSE = 0.02
_LAST_WORDS_SECONDS = 1.0


class Server:
    """Serves ``app`` on a socket that listens, from ``start`` to ``stop``."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def start(self, listener: socket.socket, backlog: int = 4096) -> None:
        self._clients = clients = Clients(self._app, self._limits)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: ClientConnection(clients), sock=listener, backlog=backlog)

    async def stop(self, grace_seconds: float) -> None:
        """Take no new requests; those under way may finish within ``grace_seconds``, and are cancelled then."""
        self._server.close()
        self._clients.leave()
        await self._until_empty(grace_seconds)
        for exchange in tuple(self._clients.under_way):
            exchange.task.cancel()
        await self._until_empty(_LAST_WORDS_SECONDS)
        for connection in tuple(self._clients.connections):
            connection.transport.abort()

    async def _until_empty(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (self._clients.connections or self._clients.under_way) and loop.time() < end:
            await asyncio.sleep(_PAUSE)
