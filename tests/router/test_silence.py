"""Timers that follow a request from its dispatch into its answer."""

from __future__ import annotations

import asyncio

import pytest

from schedloom.router.http.client import HttpUpstream
from schedloom.router.http.upstream import TimedOut, Timeouts, UpstreamRequest
from tests.router.sockets import raw_server
from tests.router.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


async def test_silence_is_noticed_however_late_the_answer_began() -> None:
    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"body")
        await asyncio.sleep(0.25)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await reader.read()

    upstream = HttpUpstream()
    async with raw_server(server) as origin:
        request = UpstreamRequest(origin, "POST", "/", (), b"body", Timeouts(60, 0.1))
        response = await upstream.send(request)
        with pytest.raises(TimedOut):
            await asyncio.wait_for(response.read(), PATIENCE_SECONDS)
        response.close()
    await upstream.close()
