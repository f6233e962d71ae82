"""What ends a request from outside: its client leaves, or its time is over."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from schedloom.router.failures import Failure


class ClientGone(Exception):
    """The client closed its connection."""


class Deadline:
    """Cancels what is inside after ``seconds`` and raises ``failure`` in its place."""

    def __init__(self, seconds: float, failure: Failure) -> None:
        self._seconds = seconds
        self._failure = failure
        self._cause: Exception | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._seconds, self._end, self._failure)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._cause is not None and kind is asyncio.CancelledError:
            raise self._cause from None

    def _end(self, cause: Exception) -> None:
        if self._cause is None and self._task is not None:
            self._cause = cause
            self._task.cancel()


class Watch(Deadline):
    """A deadline that also ends when the client leaves, with ClientGone."""

    def __init__(self, receive: Receive, seconds: float, failure: Failure) -> None:
        super().__init__(seconds, failure)
        self._receive = receive

    async def __aenter__(self) -> None:
        await super().__aenter__()
        self._watcher = asyncio.ensure_future(self._watch())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        await super().__aexit__(kind, error, trace)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._end(ClientGone())
