"""One HTTP/1.1 client connection, and the answer that travels on it."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable

import httptools

from schedloom.router.outbox import Outbox
from schedloom.router.upstream import BrokenOff, Header, TimedOut, UpstreamError, UpstreamRequest, UpstreamResponse

_READ_AHEAD = 256 * 1024
_LISTEN_SECONDS = 1.0


class Exchange(UpstreamResponse):
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
        "_last_activity",
        "_loop",
        "_raised",
        "_request",
        "_sink",
        "_timer",
        "_waiter",
        "has_head",
        "headers",
        "pieces",
        "sent_at",
        "status",
    )
    pieces: int

    def __init__(self, connection: Connection, request: UpstreamRequest) -> None:
        self.status = self.pieces = self._buffered = 0
        self.has_head = self._abandoned = self._body_begun = self._complete = self._end_was_read = False
        self._error: UpstreamError | None = None
        self._raised: Exception | None = None
        self._sink: Callable[[bytes], bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._connection = connection
        self._request = request
        self._loop = connection.loop
        self._chunks: list[bytes] = []
        self._all: list[bytes] | None = None if request.on_late_answer is None else []
        self._last_activity = self.sent_at = connection.loop.time()

    async def read(self) -> bytes:
        while not self._chunks and not self._complete:
            await self.news()
        self._end_was_read = not self._chunks
        return self._taken()

    async def pour(self, sink: Callable[[bytes], bool]) -> bool:
        while not self._chunks or sink(self._taken()):
            if self._complete:
                self._end_was_read = True
                return False
            self._sink = sink
            try:
                await self.news()
                has_enough = self._sink is None
            finally:
                self._sink = None
            if has_enough:
                break
        if self._raised is not None:
            raise self._raised
        return True

    async def read_all(self) -> bytes:
        if not self._complete:
            return await super().read_all()
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
    def heard_at(self) -> float:
        """When something of the answer came last."""
        return self._last_activity if self.has_head else 0.0

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
        left = allowed if self._chunks or self._abandoned else self._last_activity + allowed - now
        if left <= 0:
            raise TimedOut(f"{self._request.origin} was silent for {allowed:g} s")
        return now + min(left, timeouts.silence)

    def head_arrived(self, status: int, headers: list[Header]) -> None:
        self.status = status
        self.headers = headers
        self.has_head = True
        self._last_activity = self._loop.time()
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
        self._last_activity = self._loop.time()
        if self._sink is not None:
            try:
                if self._sink(data):
                    return None
            except Exception as error:
                self._raised = error
            self._sink = None
            return self._wake()
        self._chunks.append(data)
        self._buffered += len(data)
        if self._buffered > _READ_AHEAD:
            self._connection.pause()
        if self._waiter is not None:
            self._wake()
        return None

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


class Connection(asyncio.Protocol):
    """A connection to one engine, in ``open`` while it lasts, and in ``idle`` while it is ready for a request."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        origin: str,
        idle: dict[Connection, None],
        open_: set[Connection],
        outbox: Outbox,
    ) -> None:
        self.loop = loop
        self.origin = origin
        self.idle_since = 0.0
        self._idle = idle
        self._open = open_
        self._outbox = outbox
        self.transport: asyncio.Transport = None  # type: ignore[assignment]  # until it is made
        self._headers: dict[bytes, bytes] = {}
        self.on_header = self._headers.setdefault
        self._body: list[bytes] = []
        self.on_body = self._body.append
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._look_at = 0.0
        self._paused = False
        self._said_goodbye = False
        self._is_unwanted = False

    def send(self, request: UpstreamRequest, head: bytes) -> Exchange:
        assert self._exchange is None
        self._exchange = exchange = Exchange(self, request)
        due = exchange.sent_at + request.timeouts.shorter
        if self._timer is None or due < self._look_at:
            self._look_by(due)
        if request.body:
            self._write(head, request.body)
        else:
            self._write(head)
        return exchange

    @property
    def heard_at(self) -> float:
        """When something came last."""
        return max(self.idle_since, 0.0 if self._exchange is None else self._exchange.heard_at)

    def give_up_waiting(self) -> bool:
        """Nobody waits any more for the first output of the request under way. Returns whether somebody did."""
        if self._exchange is None or not self._exchange.waits:
            return False
        if self._exchange.give_up():
            self._break(TimedOut(f"{self.origin} hangs"))
        return True

    def rest(self) -> None:
        """Until there is another request."""
        self.idle_since = self.loop.time()
        self._idle[self] = None

    def pause(self) -> None:
        if not (self._paused or self.transport.is_closing()):
            self.transport.pause_reading()
            self._paused = True

    def resume(self) -> None:
        if self._paused and not self.transport.is_closing():
            self.transport.resume_reading()
            self._paused = False

    def say_goodbye(self) -> None:
        """Nothing more will be asked; what was answered already is still heard, but not over TLS."""
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            self._said_goodbye = True
            self._outbox.empty()
            self.transport.write_eof()
            self.resume()
        else:
            self.abort()

    def abort(self) -> None:
        self.transport.abort()

    def give_up(self) -> None:
        """Nobody wants it. Of one whose making was cancelled uvloop tells that it is there, before or after, and never
        that it is gone.
        """
        self._is_unwanted = True
        self._open.discard(self)
        if self.transport is not None:
            self.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._write = functools.partial(self._outbox.put, transport)
        if self._is_unwanted:
            return self.abort()
        self._open.add(self)
        tcp = transport.get_extra_info("socket")
        if tcp is not None and tcp.family in (socket.AF_INET, socket.AF_INET6):
            tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return None

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._hand_on()
            self._break(BrokenOff(f"answer is not HTTP: {error}"))
        if self._body:
            if self._exchange is not None:
                self._exchange.body_arrived(self._body)
            else:
                self._body.clear()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.pop(self, None)
        self._open.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if exc is None and exchange.until_close:
            exchange.finish()
        else:
            exchange.fail(BrokenOff(f"connection lost: {exc or 'closed by the engine'}"))

    # httptools

    def on_message_begin(self) -> None:
        """What nobody asked for must not be read as the answer to the next request."""
        if self._exchange is None:
            self.abort()

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers = list(self._headers.items())
        if not b"".join(self._headers).islower():
            headers = [(name.lower(), value) for name, value in headers]
        self._headers.clear()
        if self._exchange is not None and status >= 200:
            self._exchange.head_arrived(status, headers)

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if exchange is None or not exchange.has_head:
            return
        if self._body:
            exchange.body_arrived(self._body)
        if self._headers:
            self._headers.clear()
        self._exchange = None
        exchange.finish()
        if self._parser.should_keep_alive() and not (self._said_goodbye or self.transport.is_closing()):
            if self._paused:
                self.resume()
            self.rest()
        else:
            self.abort()

    def _hand_on(self) -> None:
        if self._body and self._exchange is not None:
            self._exchange.body_arrived(self._body)
        self._body.clear()

    def _break(self, error: UpstreamError) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.fail(error)
        self.abort()

    def _look_by(self, due: float) -> None:
        """One timer serves all exchanges, and is moved only for one that is to be looked at sooner."""
        if self._timer is not None:
            self._timer.cancel()
        self._look_at = due
        self._timer = self.loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._exchange is not None:
            try:
                self._look_by(self._exchange.check_silence())
            except TimedOut as error:
                self._break(error)
