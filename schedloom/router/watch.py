"""What ends a request from outside: its client leaves, or its time is over."""

from __future__ import annotations

import asyncio
from types import TracebackType

from schedloom.router.failures import Failure
from schedloom.router.http.deadlines import Deadlines
from schedloom.router.http.line import ClientGone, Line


class Watch:
    """Cancels what is inside when the client leaves (ClientGone) or when its time is over (Failure, 504)."""

    __slots__ = ("_cause", "_deadlines", "_line")

    def __init__(self, line: Line, deadlines: Deadlines) -> None:
        self._line = line
        self._deadlines = deadlines
        self._cause: type[ClientGone] | Failure | None = None

    def __enter__(self) -> None:
        if not self._line.watched_by(self._gone):
            raise ClientGone
        self._deadlines.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadlines.take_back(self)
        self._line.watched_by(None)
        if self._cause is not None and kind is asyncio.CancelledError:
            raise self._cause from None

    def _gone(self) -> None:
        self._end(ClientGone)

    def __call__(self) -> None:
        """Its time is over."""
        self._end(Failure.own(504, "The request took too long.", "request_timeout"))

    def _end(self, cause: type[ClientGone] | Failure) -> None:
        if self._cause is None:
            self._cause = cause
            self._line.task.cancel()
