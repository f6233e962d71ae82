"""One of the processes of a router; run by its supervisor as ``python -m schedloom.router.processes.child``.

Its assignment comes by standard input, whose end means that the supervisor is gone. Its first line of output, in
JSON, says why it cannot serve, or is an empty list when it does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import signal
import sys
from collections.abc import Sequence

import uvloop

from schedloom.core.errors import ConfigurationError
from schedloom.router.app import RouterApp
from schedloom.router.metrics import Metrics
from schedloom.router.processes.assignment import Assignment
from schedloom.router.processes.table import SharedSessions
from schedloom.router.serve import bind, configure_logging, open_store, serve


def main() -> None:
    assignment: Assignment = pickle.load(sys.stdin.buffer)
    configure_logging(logging.getLevelName(assignment.log_level))
    try:
        uvloop.run(_serve(assignment))
    except ConfigurationError as error:
        _say(error.sentences)
        sys.exit(1)


async def _serve(assignment: Assignment) -> None:
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _leave_with_the_supervisor)
    settings = assignment.settings
    store = open_store(settings) or SharedSessions(assignment.sessions, settings.session_idle_seconds)
    app = RouterApp(settings, sessions=store, metrics=Metrics(assignment.figures))
    await serve(settings, app, bind(settings.host, settings.port, shared=True), lambda: _say(()))


def _leave_with_the_supervisor() -> None:
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    os.kill(os.getpid(), signal.SIGTERM)


def _say(sentences: Sequence[str]) -> None:
    print(json.dumps(sentences), flush=True)


if __name__ == "__main__":
    main()
