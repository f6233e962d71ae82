"""The router's answer to one client."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from schedloom.core.routing import SessionOwner
from schedloom.router.continuation.story import Story
from schedloom.router.failures import Failure, error_body
from schedloom.router.http.line import Line
from schedloom.router.http.upstream import Sink, lines_of
from schedloom.router.requests.call import new_request_id
from schedloom.router.requests.dialect import COMPLETIONS, Dialect
from schedloom.router.requests.headers import lines_about
from schedloom.router.transfer.turn import Turn

if TYPE_CHECKING:
    from schedloom.router.telemetry.traces import Trace

JSON = b"content-type: application/json\r\n"


class Reply:
    """Written once, front to back. ``started`` tells whether anything has left.

    ``on_start`` is called with this reply as the first byte leaves, ``on_success`` when an engine's answer is known to
    be complete, before its last bytes leave: whoever reads the end may rely on what was recorded. ``came_at`` is when
    its request came and ``asked_at`` when the Decoder was asked, by the performance counter, and ``pace`` the seconds
    between two events of a stream.
    ``decision``, ``request_id`` and ``owner`` are of the attempt that the answer will be of, a later one in place of an
    earlier; ``owner`` is the Decoder, where the answer is one's. ``status`` is what was answered, if anything was.
    ``story`` is kept of a request that an engine may hand back, ``turn`` of one whose KV a Prefiller may pull later.
    ``trace`` is of a request that is traced. ``write`` is the line's.
    """

    __slots__ = (
        "_line",
        "asked_at",
        "came_at",
        "decision",
        "dialect",
        "ended",
        "on_start",
        "on_success",
        "owner",
        "pace",
        "request_id",
        "started",
        "status",
        "story",
        "succeeded",
        "trace",
        "turn",
        "write",
    )

    def __init__(self, line: Line, dialect: Dialect = COMPLETIONS) -> None:
        self.dialect = dialect
        self.started = False
        self.ended = False
        self.succeeded = False
        self.status = 0
        self.came_at = time.perf_counter()
        self.asked_at: float | None = None
        self.pace: float | None = None
        self.decision = ""
        self.request_id = ""
        self.owner: SessionOwner | None = None
        self.story: Story | None = None
        self.turn: Turn | None = None
        self.trace: Trace | None = None
        self.on_start: Callable[[Reply], None] | None = None
        self.on_success: Callable[[Reply], Awaitable[None] | None] | None = None
        self.write = line.write
        self._line = line

    def whole(self, status: int, lines: bytes, body: bytes) -> bool:
        """Returns whether all of it was taken at once; otherwise ``drained`` is to be awaited.

        ``lines`` are headers as they are sent.
        """
        self._start(status, b"%bcontent-length: %d\r\n" % (lines, len(body)), framed=True)
        self.ended = True
        return self._line.end(body)

    async def page(self, status: int, lines: bytes, body: bytes) -> None:
        """The whole answer, until it was taken."""
        if not self.whole(status, lines, body):
            await self._line.drained()

    def chunk_writer(self) -> Sink | None:
        return self._line.chunk_writer()

    def start_stream(self, lines: bytes) -> None:
        self._start(200, lines, framed=False)

    async def drained(self) -> None:
        await self._line.drained()

    async def end(self, last: bytes = b"") -> None:
        self.ended = True
        if not self._line.end(last):
            await self._line.drained()

    def succeed(self) -> Awaitable[None] | None:
        """Returns what is still to be awaited."""
        self.succeeded = True
        return None if self.on_success is None else self.on_success(self)

    async def fail(self, failure: Failure) -> None:
        """Answer with an error instead of output; one that no engine knows of has an id too."""
        self.request_id = self.request_id or new_request_id()
        lines = lines_of(failure.headers)
        if not any(name == b"content-type" for name, _ in failure.headers):
            lines += JSON
        body = self.dialect.failure(failure.body) if failure.is_own else failure.body
        await self.page(failure.status, lines, body)

    async def stop(self, failure: Failure) -> None:
        """The router itself gives up: an error in place of an answer, or in the midst of one."""
        if not self.started:
            await self.fail(failure)
        elif not self.ended:
            await self.end(self.dialect.error(failure.body))

    async def break_off(self, message: str, code: str) -> None:
        """End a stream with an error event: what was delivered is not a complete answer."""
        await self.end(self.dialect.error(error_body(502, message, code)))

    def _start(self, status: int, lines: bytes, framed: bool) -> None:
        self.started = True
        self.status = status
        if self.on_start is not None:
            self.on_start(self)
        if self.request_id:
            decoder = "" if self.owner is None else self.owner.worker
            lines += b"%b%b\r\n" % (lines_about(self.decision, decoder), self.request_id.encode())
        self._line.start(status, lines, framed)
