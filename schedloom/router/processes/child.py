"""One of the processes of a router, which its supervisor runs.

Its assignment comes by standard input, and later the engines whenever they have changed; the end means that the
supervisor is gone. Its first line of output, in JSON, says why it cannot serve, or is an empty list when it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from typing import Any

import uvloop

from schedloom.core.errors import ConfigurationError
from schedloom.router.app import RouterApp
from schedloom.router.fleet.roster import Roster
from schedloom.router.logs import configure_logging
from schedloom.router.processes.assignment import SIZE_BYTES, Assignment
from schedloom.router.serve import bind, open_store, serve
from schedloom.router.sessions.table import SharedSessions
from schedloom.router.telemetry.metrics import Metrics


def main() -> None:
    sys.stdout = sys.stderr  # what a policy prints is nothing that the supervisor waits for
    try:
        uvloop.run(_serve())
    except ConfigurationError as error:
        _say(error.sentences)
        sys.exit(1)


async def _serve() -> None:
    supervisor = await _listen()
    assignment: Assignment = await _told(supervisor)
    configure_logging(logging.getLevelName(assignment.log_level), assignment.place)
    settings, roster = assignment.settings, Roster()
    roster.engines = assignment.engines
    store = open_store(settings, roster) or SharedSessions(assignment.sessions, settings.session_idle_seconds)
    app = RouterApp(settings, sessions=store, metrics=Metrics(assignment.figures), roster=roster)
    following = asyncio.create_task(_follow(supervisor, app))
    listener = bind(settings.host, settings.port, shared=True)
    await serve(settings, app, listener, lambda: _say(()), is_first=assignment.is_first)
    following.cancel()


async def _listen() -> asyncio.StreamReader:
    reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def _told(supervisor: asyncio.StreamReader) -> Any:
    """Raises IncompleteReadError when it is gone."""
    size = int.from_bytes(await supervisor.readexactly(SIZE_BYTES), "big")
    return pickle.loads(await supervisor.readexactly(size))


async def _follow(supervisor: asyncio.StreamReader, app: RouterApp) -> None:
    """The engines that it names, and to the end."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            app.roster.engines = await _told(supervisor)
            app.renew()
    os.kill(os.getpid(), signal.SIGTERM)


def _say(sentences: Sequence[str]) -> None:
    print(json.dumps(sentences), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
