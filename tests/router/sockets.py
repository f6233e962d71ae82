"""Fake engines and routers on loopback sockets."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from starlette.types import ASGIApp, Receive, Scope, Send

from schedloom.router.http.clients import Limits
from schedloom.router.http.server import Server
from schedloom.router.serve import address_of, listen
from tests.router.fakes import FakeEngine, Seen
from tests.router.waiting import PATIENCE_SECONDS

_LIMITS = Limits()

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(app: ASGIApp, host: str = "127.0.0.1", limits: Limits = _LIMITS) -> AsyncIterator[str]:
    """The address at which ``app`` is served."""
    listener = listen(host, 0)
    server = Server(app, limits)
    await server.start(listener)
    try:
        yield address_of(host, listener)
    finally:
        await server.stop(grace_seconds=0)
        listener.close()


@asynccontextmanager
async def raw_server(handler: Handler) -> AsyncIterator[str]:
    """The address of a server that speaks whatever ``handler`` writes."""
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.ensure_future(_handled(handler, reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)


@asynccontextmanager
async def router_process(
    prefillers: Sequence[str], decoders: Sequence[str], *options: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A router that runs by itself, and the address at which it serves."""
    engines = [
        *(word for url in prefillers for word in ("--prefill", url)),
        *(word for url in decoders for word in ("--decode", url)),
    ]
    program = "import typer, schedloom.router.commands as c; typer.run(c.route)"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *engines, "--port", "0", *options, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        match = re.search(r"http://\S+", line)
        assert match is not None, line
        yield process, match[0]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def refuses(address: str) -> bool:
    """Whether nobody listens there any more."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), PATIENCE_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except ConnectionError:
        pass
    return False


async def _handled(handler: Handler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
        await handler(reader, writer)
    writer.close()
    with suppress(ConnectionError, asyncio.CancelledError):
        await writer.wait_closed()


def asgi(engine: FakeEngine) -> ASGIApp:
    """A fake engine as an application. Counts clients that leave as cancelled."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raw = await _body(receive)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        work = asyncio.ensure_future(_answer(engine, Seen(scope["path"], headers, raw), send))
        leaving = asyncio.ensure_future(receive())
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            engine.cancelled += 1
            work.cancel()
        leaving.cancel()
        if work.done():
            await work

    return app


async def _body(receive: Receive) -> bytes:
    raw = b""
    while True:
        message = await receive()
        raw += bytes(message.get("body", b""))
        if not message.get("more_body", False):
            return raw


async def _answer(engine: FakeEngine, seen: Seen, send: Send) -> None:
    answer = await engine.answer(seen)
    headers = [(b"content-type", answer.kind), *answer.headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    for step in answer.steps:
        if isinstance(step, Exception):
            raise step
        if isinstance(step, asyncio.Event):
            await step.wait()
        else:
            await send({"type": "http.response.body", "body": step, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
