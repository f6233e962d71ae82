"""The server's side of HTTP/1.1, with limits on what a client may send and how long it may take."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import httptools

from schedloom.router.failures import busy, error_body
from schedloom.router.http.clients import Clients
from schedloom.router.http.deadlines import Deadlines
from schedloom.router.http.exchange import ClientExchange
from schedloom.router.http.outbox import Nowhere
from schedloom.router.http.upstream import Header, lines_of
from schedloom.router.requests.dialect import DIALECTS, Dialect

_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}
_HEAD = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"content-length: %d\r\n\r\n%b"
)


def _refusal(dialect: Dialect) -> bytes:
    body = dialect.failure(busy().body)
    return _BUSY % (len(body), body)


_NOWHERE = Nowhere()
_MOST_ASKED = 256
_REFUSALS = {path.encode(): _refusal(dialect) for path, dialect in DIALECTS.items()}
_HOLDABLE = tuple(b"POST %b HTTP/1.1\r\n" % path for path in _REFUSALS)
_MOST_HELD = 256 * 1024


class ClientConnection(asyncio.Protocol):
    """Reads requests and has the application answer them, one after the other.

    Closes connections whose request is not HTTP (400), too long in its head (431), or too slow in its head or body
    (408). A request that arrives in one piece costs no timer.
    """

    def __init__(self, clients: Clients) -> None:
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.writable = True
        self._clients = clients
        self._outbox = clients.outbox
        self._parser = httptools.HttpRequestParser(self)
        self._headers: list[Header] = []
        self._target = b""
        self._bytes_beside = 0
        self._in_body = False
        self._is_at_rest = True
        self._is_unwanted = False
        self._refusal = b""
        self._held = b""
        self._arriving: ClientExchange | None = None
        self._answering: ClientExchange | None = None
        self._asked: deque[ClientExchange] = deque()
        self._running: tuple[Deadlines, Callable[[], None]] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._resting_since: float | None = None
        self._end_of_rest: asyncio.TimerHandle | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._loop = asyncio.get_running_loop()  # before Python 3.12 each such call asks for the process id
        self._clients.connections.add(self)
        self._allow(self._clients.heads, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._outbox = _NOWHERE  # uvloop raises an error for each further write
        self._arrived()
        if self._held:
            self._clients.arrivals.forget(self)
        self._clients.connections.discard(self)
        if self._end_of_rest is not None:
            self._end_of_rest.cancel()
        self.resume_writing()
        if self._arriving is not None and self._arriving is not self._answering:
            self._arriving.lost()
        if self._answering is not None:
            self._answering.lost()
        self._asked.clear()

    def data_received(self, data: bytes) -> None:
        if self._is_at_rest:
            if self._held or (not self._clients.arrivals.may_begin() and data.startswith(_HOLDABLE)):
                return self._hold(data)
            self._is_at_rest = False
        while data:
            self._bytes_beside += len(data)
            try:
                self._parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = self._decline_upgrade(data[upgrade.args[0] :])
            except httptools.HttpParserError:
                return self._refuse(400, "The request is not HTTP/1.1.", "invalid_http")
        if self._bytes_beside > self._clients.limits.max_header_bytes:
            self._refuse_head()
        elif self._in_body:
            self._allow_body()
        elif self._bytes_beside:
            self._allow(self._clients.heads, self._head_is_late)
        return None

    def _decline_upgrade(self, rest: bytes) -> bytes:
        """The request as one that asks for no other protocol, to be read again: it would be read without its body."""
        parser, self._parser = self._parser, httptools.HttpRequestParser(self)
        target, self._target = self._target, b""
        headers, self._headers = self._headers, []
        self._bytes_beside = 0
        if parser.get_method() == b"CONNECT":
            self._refuse(400, "The request is not HTTP/1.1.", "invalid_http")
        if self.transport.is_closing():
            return b""
        line = b"%b %b HTTP/%b\r\n" % (parser.get_method(), target, parser.get_http_version().encode())
        kept = lines_of(header for header in headers if header[0] != b"upgrade")
        return line + kept + b"\r\n" + rest

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # httptools

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._parser.should_upgrade():
            return None
        if self._running is not None:
            self._arrived()
        self._resting_since = None
        self._is_at_rest = False
        self._in_body = True
        received, self._bytes_beside = self._bytes_beside, 0
        target, self._target = self._target, b""
        headers, self._headers = self._headers, []
        limits = self._clients.limits
        if received > limits.max_header_bytes and _size(target, headers) > limits.max_header_bytes:
            return self._refuse_head()
        if self.transport.is_closing():
            return None
        if (self._is_unwanted or not limits.may_come()) and self._is_refusable(target, headers):
            self._refusal = _REFUSALS[target]
            return None
        parser = self._parser
        keep = parser.should_keep_alive() and parser.get_http_version() == "1.1"
        self._arriving = exchange = ClientExchange(self, parser.get_method().decode(), target, headers, keep)
        if self._answering is None:
            self._answer(exchange)
        elif len(self._asked) < _MOST_ASKED:
            self._asked.append(exchange)
            self.transport.pause_reading()
        else:
            self._refuse(400, "Too many requests at once on one connection.", "too_many_at_once")
        return None

    def on_body(self, body: bytes) -> None:
        self._bytes_beside = 0
        if self._arriving is not None:
            self._arriving.body_arrived(body)

    def on_message_complete(self) -> None:
        if not self._in_body:
            return
        if self._running is not None:
            self._arrived()
        self._in_body = False
        self._bytes_beside = 0
        if self._headers:
            self._headers = []  # trailers, which the next request must not inherit
        exchange, self._arriving = self._arriving, None
        if self._refusal:
            self._refuse_shortly()
        elif exchange is not None:
            exchange.complete()
            if self._answering is None:
                self._go_on()

    # Arrival

    def _hold(self, data: bytes) -> None:
        """What comes behind a request that is held is held with it; no time runs meanwhile."""
        if not self._held:
            self._arrived()
            self._resting_since = None
            self._clients.arrivals.hold(self)
        self._held += data
        if len(self._held) > _MOST_HELD:
            self.transport.pause_reading()

    def begin(self) -> None:
        data, self._held = self._held, b""
        if len(data) > _MOST_HELD:
            self.transport.resume_reading()
        self._is_at_rest = False
        self.data_received(data)

    def turn_away(self) -> None:
        self._is_unwanted = True
        self.begin()
        self._is_unwanted = False

    # Called by exchanges.

    def write(self, data: bytes) -> bool:
        """Returns whether more is taken at once."""
        self._outbox.put(self.transport, data)
        return self.writable

    def close(self) -> None:
        """After what is written."""
        self._clients.outbox.empty()
        self.transport.close()

    async def drained(self) -> None:
        while not self.writable:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    def answered(self, keep: bool) -> None:
        """An answer is written to its end."""
        self._answering = None
        if not keep or self._clients.leaving:
            self.close()
        elif self._asked:
            self._go_on()
        elif self._arriving is None and not self.transport.is_closing():
            self._rest()

    def finished(self, exchange: ClientExchange) -> None:
        """The application is done with it."""
        self._clients.under_way.discard(exchange)

    def leave(self) -> None:
        if self._answering is None:
            self.close()

    def _go_on(self) -> None:
        if self.transport.is_closing():
            return
        if not self._asked:
            return self._rest()
        self._answer(self._asked.popleft())
        if not self._asked:
            self.transport.resume_reading()
            self._allow_body()
        return None

    def _answer(self, exchange: ClientExchange) -> None:
        self._answering = exchange
        exchange.task = self._loop.create_task(exchange.run(self._clients.app))
        self._clients.under_way.add(exchange)

    # Limits

    def _rest(self) -> None:
        """Until the next request begins. One timer serves all rests: whoever is asked again and again costs none."""
        self._is_at_rest = True
        self._resting_since = self._loop.time()
        if self._end_of_rest is None:
            self._end_of_rest = self._loop.call_later(self._clients.limits.idle_seconds, self._look)

    def _look(self) -> None:
        self._end_of_rest = None
        if self._resting_since is None:
            return
        due = self._resting_since + self._clients.limits.idle_seconds
        if due <= self._loop.time():
            self.close()
        else:
            self._end_of_rest = self._loop.call_at(due, self._look)

    def _allow(self, deadlines: Deadlines, late: Callable[[], None]) -> None:
        self._resting_since = None
        if self._running is None or self._running[0] is not deadlines:
            self._arrived()
            self._running = deadlines, late
            deadlines.add(late)

    def _allow_body(self) -> None:
        """The time does not run while nothing is read, because another answer comes first."""
        if self._in_body and not self._asked:
            self._allow(self._clients.bodies, self._body_is_late)

    def _arrived(self) -> None:
        if self._running is not None:
            deadlines, late = self._running
            deadlines.take_back(late)
            self._running = None

    def _head_is_late(self) -> None:
        self._refuse(408, "The request's headers took too long to arrive.", "headers_too_slow")

    def _body_is_late(self) -> None:
        self._refuse(408, "The request's body took too long to arrive.", "body_too_slow")

    def _is_refusable(self, target: bytes, headers: list[Header]) -> bool:
        """Not in the midst of another answer, nor where a client waits to be told to go on."""
        is_for_engines = target in _REFUSALS and self._parser.get_method() == b"POST"
        return is_for_engines and self._answering is None and not any(name == b"expect" for name, _ in headers)

    def _refuse_shortly(self) -> None:
        refusal, self._refusal = self._refusal, b""
        self._clients.limits.on_refused()
        self.write(refusal)
        self.answered(self._parser.should_keep_alive())

    def _refuse_head(self) -> None:
        self._refuse(431, "The request's headers are too long.", "headers_too_long")

    def _refuse(self, status: int, message: str, code: str) -> None:
        self._arrived()
        if not self.transport.is_closing():
            if not self._was_answered():
                body = error_body(status, message, code)
                self.write(_HEAD % (status, _REASONS[status], len(body)) + body)
            self.close()

    def _was_answered(self) -> bool:
        """Whether what is refused has an answer, or the beginning of one."""
        return self._arriving is not None if self._answering is None else self._answering.started


def _size(target: bytes, headers: list[Header]) -> int:
    return len(target) + sum(len(name) + len(value) for name, value in headers)
