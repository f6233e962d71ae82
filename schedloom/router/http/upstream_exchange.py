"""One request to an engine under way, and its answer as far as it has arrived."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from schedloom.router.http.upstream import Header, Sink, TimedOut, UpstreamError, UpstreamRequest, UpstreamResponse

if TYPE_CHECKING:
    from schedloom.router.http.connection import UpstreamConnection

_READ_AHEAD = 256 * 1024
_LISTEN_SECONDS = 1.0


class UpstreamExchange(UpstreamResponse):
    """A request under way: its answer as far as it has arrived."""

    __slots__ = (
        "_abandoned",
        "_all",
        "_body_begun",
        "_buffered",
        "_chunks",
        "_complete",
        "_connection",
        "_end_was_read",
        "_error",
        "_loop",
        "_raised",
        "_request",
        "_sink",
        "_timer",
        "_waiter",
        "chunk_sink",
        "has_head",
        "headers",
        "pieces",
        "sent_at",
        "status",
    )
    pieces: int

    def __init__(self, connection: UpstreamConnection, request: UpstreamRequest) -> None:
        self.status = self.pieces = self._buffered = 0
        self.has_head = self._abandoned = self._body_begun = self._complete = self._end_was_read = False
        self._error: UpstreamError | None = None
        self._raised: Exception | None = None
        self._sink: Sink | None = None
        self.chunk_sink: Sink | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._connection = connection
        self._request = request
        self._loop = connection.loop
        self._chunks: list[bytes] = []
        self._all: list[bytes] | None = None if request.on_late_answer is None else []
        self.sent_at = connection.loop.time()

    async def read(self) -> bytes:
        while not self._chunks and not self._complete:
            await self.news()
        self._end_was_read = not self._chunks
        return self._taken()

    async def pour(self, sink: Sink, chunk_sink: Sink | None = None) -> bool:
        while not self._chunks or sink(self._taken()):
            if self._complete:
                self._end_was_read = True
                return False
            self._sink = sink
            self.chunk_sink = chunk_sink if self._all is None else None
            try:
                await self.news()
                has_enough = self._sink is None
            finally:
                self._sink = self.chunk_sink = None
            if has_enough:
                break
        if self._raised is not None:
            raise self._raised
        return True

    def arrived(self) -> bytes | None:
        if not self._complete:
            return None
        self._end_was_read = True
        chunks, self._chunks = self._chunks, []
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _taken(self) -> bytes:
        chunks, self._chunks = self._chunks, []
        if self._buffered > _READ_AHEAD:
            self._connection.resume()
        self._buffered = 0
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def close(self) -> None:
        if self._end_was_read or self._abandoned:
            return
        self._abandoned = True
        if self._complete:
            self._tell_late_answer()
        elif self._error is not None:
            self._connection.abort()
        elif self._request.on_late_answer is not None:
            self._connection.say_goodbye()
            self._timer = self._loop.call_later(_LISTEN_SECONDS, self._connection.abort)
        else:
            self._settle()

    def _settle(self) -> None:
        settled_at = self.sent_at + self._request.settle_seconds
        if self._body_begun or settled_at <= self._loop.time():
            self._connection.abort()
        else:
            self._timer = self._loop.call_at(settled_at, self._connection.abort)

    def _tell_late_answer(self) -> None:
        if self._request.on_late_answer is not None:
            self._request.on_late_answer(self.status, b"".join(self._all or ()))

    def news(self) -> asyncio.Future[None]:
        """Done when there is something new. Raises what the exchange failed with."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    # Called by the connection.

    @property
    def until_close(self) -> bool:
        """Whether the answer's length is told by the end of the connection only."""
        framed = (b"content-length", b"transfer-encoding")
        return self.has_head and not any(name in framed for name, _ in self.headers)

    @property
    def waits(self) -> bool:
        """Whether a client waits for first output."""
        return not self._abandoned and self._request.waits(self._body_begun)

    def give_up(self) -> bool:
        """Nobody waits any more. Returns whether it is to end."""
        return self._request.give_up()

    def check_silence(self) -> float:
        """The instant of the next look. Raises TimedOut when the engine has been silent for too long."""
        timeouts = self._request.timeouts
        allowed = timeouts.silence if self.has_head else timeouts.first_byte
        now = self._loop.time()
        since = self._connection.heard_at if self.has_head else self.sent_at
        left = allowed if self._chunks or self._abandoned else since + allowed - now
        if left <= 0:
            raise TimedOut(f"{self._request.origin} was silent for {allowed:g} s")
        return now + min(left, timeouts.silence)

    def head_arrived(self, status: int, headers: list[Header]) -> None:
        self.status = status
        self.headers = headers
        self.has_head = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        self._waiter = None

    def body_arrived(self, parts: list[bytes]) -> None:
        """All that arrived at once, which is read at once; it is taken out of ``parts``."""
        count = len(parts)
        data = parts[0] if count == 1 else b"".join(parts)
        self.pieces += count
        parts.clear()
        if self._all is not None:
            self._all.append(data)
        elif self._abandoned:
            return self._connection.abort()
        self._body_begun = True
        if self._sink is not None:
            return self.pour_into(self._sink, data)
        self._chunks.append(data)
        self._buffered += len(data)
        if self._buffered > _READ_AHEAD:
            self._connection.pause()
        if self._waiter is not None:
            self._wake()
        return None

    def pour_into(self, sink: Sink, data: bytes) -> None:
        try:
            if sink(data):
                return
        except Exception as error:
            self._raised = error
        self._sink = self.chunk_sink = None
        self._wake()

    def finish(self) -> None:
        self._complete = True
        if self._timer is not None:
            self._timer.cancel()
        if self._waiter is not None:
            self._wake()
        if self._abandoned:
            self._tell_late_answer()

    def fail(self, error: UpstreamError) -> None:
        if self._complete or self._error is not None:
            return
        self._error = error
        if self._timer is not None:
            self._timer.cancel()
        self._wake()
