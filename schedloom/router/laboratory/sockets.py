"""The simulated engines behind loopback sockets, in front of which a router runs with its own HTTP client."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Any

from schedloom.router.http.upstream import UpstreamRequest, lines_of
from schedloom.router.laboratory.engines import SimulatedEngine, SimulatedResponse
from schedloom.router.laboratory.town import Town
from schedloom.router.laboratory.upstream import SimulatedUpstream
from schedloom.router.tasks import stopped

SLOW_FAULTS = ("hang", "slow", "stop")
"""They are timeouts: on a real clock they would be waited for."""


class WiredTown(Town):
    """A fleet on sockets of this machine. Its faults are those that take no time."""

    pace = 0.01
    most_dispatches = 2 * Town.most_dispatches
    """A kept connection that closes before a byte of answer is replaced by a fresh one, once."""
    rest = 0.2

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._serving: set[Any] = set()

    async def play(self, clients: int = 4, turns: int = 4) -> None:
        async with AsyncExitStack() as stack:
            for engine in self.engines:
                for fault in SLOW_FAULTS:
                    setattr(engine.faults, fault, 0.0)
                await stack.enter_async_context(await self._listen(engine))
            await super().play(clients, turns)
        await stopped(*self._serving)

    async def _listen(self, engine: SimulatedEngine) -> asyncio.Server:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._serving.add(asyncio.current_task())
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._exchange(engine, reader, writer):
                    pass
            writer.transport.abort()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        engine.origin = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _exchange(
        self, engine: SimulatedEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """One request and its answer; whether the connection is still good."""
        request = await _received(engine.origin, reader)
        try:
            response = await SimulatedUpstream(self.engines, self.ledger).send(request)
            await _say(response, writer)
        except Exception:
            return False
        return True

    def _upstream(self) -> None:
        """The router's own."""


async def _received(origin: str, reader: asyncio.StreamReader) -> UpstreamRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, path, _ = head[0].split(" ")
    fields = [line.partition(":")[::2] for line in head[1:] if line]
    headers = [(name.lower().encode(), value.strip().encode()) for name, value in fields]
    length = int(dict(headers).get(b"content-length", b"0"))
    return UpstreamRequest(origin, method, path, (lines_of(headers),), await reader.readexactly(length))


async def _say(response: SimulatedResponse, writer: asyncio.StreamWriter) -> None:
    """Raises what the engine's answer breaks off with."""
    kind = dict(response.headers)[b"content-type"].decode()
    head = f"HTTP/1.1 {response.status} Said\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head.encode())
    response.break_off_where_silent()
    while piece := await response.read():
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    await writer.drain()
