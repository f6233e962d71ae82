"""What ends a request from outside: its client leaves, or its time is over."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from schedloom.router.failures import Failure


class ClientGone(Exception):
    """The client closed its connection."""


class Watch:
    """Cancels what is inside when the client leaves (ClientGone) or after ``seconds`` (Failure, 504)."""

    __slots__ = ("_cause", "_receive", "_seconds", "_task", "_timer", "_watcher")

    def __init__(self, receive: Receive, seconds: float) -> None:
        self._receive = receive
        self._seconds = seconds
        self._cause: type[ClientGone] | Failure | None = None

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task(loop)
        self._timer = loop.call_later(self._seconds, self._too_late)
        self._watcher = loop.create_task(self._watch())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._watcher.cancel()
        if self._cause is not None and kind is asyncio.CancelledError:
            raise self._cause from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._end(ClientGone)

    def _too_late(self) -> None:
        self._end(Failure.own(504, "The request took too long.", "request_timeout"))

    def _end(self, cause: type[ClientGone] | Failure) -> None:
        if self._cause is None and self._task is not None:
            self._cause = cause
            self._task.cancel()
