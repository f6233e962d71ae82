"""One HTTP/1.1 connection to an engine."""

from __future__ import annotations

import asyncio
import socket

import httptools

from schedloom.router.http.chunks import is_chunk_of_json
from schedloom.router.http.outbox import Outbox
from schedloom.router.http.upstream import BrokenOff, TimedOut, UpstreamError, UpstreamRequest
from schedloom.router.http.upstream_exchange import UpstreamExchange


class Idle(dict["UpstreamConnection", None]):
    """An engine's connections that are ready for a request. ``heard_at`` is when something came last by one that is no
    more.
    """

    heard_at = 0.0


class UpstreamConnection(asyncio.Protocol):
    """A connection to one engine, in ``open`` while it lasts, and in ``idle`` while it is ready for a request.

    ``heard_at`` is when something came last, by the event loop's clock.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        origin: str,
        idle: Idle,
        open_: set[UpstreamConnection],
        outbox: Outbox,
    ) -> None:
        self.loop = loop
        self.origin = origin
        self.idle_since = 0.0
        self.heard_at = 0.0
        self._idle = idle
        self._open = open_
        self._outbox = outbox
        self.transport: asyncio.Transport = None  # type: ignore[assignment]  # until it is made
        self._headers: dict[bytes, bytes] = {}
        self.on_header = self._headers.setdefault
        self._body: list[bytes] = []
        self.on_body = self._body.append
        self._is_between_chunks = False
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: UpstreamExchange | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._look_at = 0.0
        self._paused = False
        self._said_goodbye = False
        self._is_unwanted = False

    def send(self, request: UpstreamRequest, head: bytes) -> UpstreamExchange:
        assert self._exchange is None
        self._exchange = exchange = UpstreamExchange(self, request)
        due = exchange.sent_at + request.timeouts.shorter
        if self._timer is None or due < self._look_at:
            self._look_by(due)
        self._outbox.put(self.transport, head, request.body)
        return exchange

    def give_up_waiting(self) -> bool:
        """Nobody waits any more for the first output of the request under way. Returns whether somebody did."""
        if self._exchange is None or not self._exchange.waits:
            return False
        if self._exchange.give_up():
            self._break(TimedOut(f"{self.origin} hangs"))
        return True

    def rest(self, since: float) -> None:
        """Until there is another request."""
        self.idle_since = since
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
        if self._is_unwanted:
            return self.abort()
        self._open.add(self)
        tcp = transport.get_extra_info("socket")
        if tcp is not None and tcp.family in (socket.AF_INET, socket.AF_INET6):
            tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return None

    def data_received(self, data: bytes) -> None:
        self.heard_at = self.loop.time()
        exchange = self._exchange
        if (
            self._is_between_chunks
            and exchange is not None
            and exchange.chunk_sink is not None
            and is_chunk_of_json(data)
        ):
            exchange.pieces += 1
            exchange.pour_into(exchange.chunk_sink, data)  # the parser stands where it would stand behind it
        else:
            self._read(data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.pop(self, None)
        self._open.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        exchange = self._last_exchange()
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

    def on_chunk_header(self) -> None:
        self._is_between_chunks = False

    def on_chunk_complete(self) -> None:
        self._is_between_chunks = True

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
            self.rest(self.heard_at)
        else:
            self._idle.heard_at = self.heard_at
            self.abort()

    def _read(self, data: bytes) -> None:
        self._is_between_chunks = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._hand_on()
            self._break(BrokenOff(f"answer is not HTTP: {error}"))
        if self._is_between_chunks and not data.endswith(b"\r\n"):
            self._is_between_chunks = False  # but in the midst of a chunk's first line
        if self._body:
            if self._exchange is not None:
                self._exchange.body_arrived(self._body)
            else:
                self._body.clear()

    def _hand_on(self) -> None:
        if self._body and self._exchange is not None:
            self._exchange.body_arrived(self._body)
        self._body.clear()

    def _break(self, error: UpstreamError) -> None:
        exchange = self._last_exchange()
        if exchange is not None:
            exchange.fail(error)
        self.abort()

    def _last_exchange(self) -> UpstreamExchange | None:
        """The one under way, if any. There is no other on this connection."""
        self._idle.heard_at = max(self._idle.heard_at, self.heard_at)
        exchange, self._exchange = self._exchange, None
        return exchange

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
