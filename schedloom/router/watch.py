"""What ends a request from outside: its client leaves, or its time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from starlette.types import Receive, Scope

from schedloom.router.failures import Failure

CONNECTION = "schedloom.connection"
"""Where in a scope a server puts a ``Connection`` of its own, to spare a task that waits for its end."""


class Connection(Protocol):
    """A client's connection."""

    def watched_by(self, on_lost: Callable[[], None] | None) -> bool:
        """Call ``on_lost`` at its end, instead of whatever was to be called; false when it has ended already."""
        ...


class ClientGone(Exception):
    """The client closed its connection."""


class Watch:
    """Cancels what is inside when the client leaves (ClientGone) or after ``seconds`` (Failure, 504)."""

    __slots__ = ("_cause", "_connection", "_receive", "_seconds", "_task", "_timer", "_watcher")

    def __init__(self, scope: Scope, receive: Receive, seconds: float) -> None:
        self._connection: Connection | None = scope.get(CONNECTION)
        self._receive = receive
        self._seconds = seconds
        self._cause: type[ClientGone] | Failure | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task(loop)
        self._timer = loop.call_later(self._seconds, self._too_late)
        if self._connection is None:
            self._watcher = loop.create_task(self._watch())
        elif not self._connection.watched_by(self._gone):
            self._timer.cancel()
            raise ClientGone

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        elif self._connection is not None:
            self._connection.watched_by(None)
        if self._cause is not None and kind is asyncio.CancelledError:
            raise self._cause from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone()

    def _gone(self) -> None:
        self._end(ClientGone)

    def _too_late(self) -> None:
        self._end(Failure.own(504, "The request took too long.", "request_timeout"))

    def _end(self, cause: type[ClientGone] | Failure) -> None:
        if self._cause is None and self._task is not None:
            self._cause = cause
            self._task.cancel()
