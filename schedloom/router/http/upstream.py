"""What the router needs of an HTTP client, and nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from schedloom.router.tasks import within

Header = tuple[bytes, bytes]
Sink = Callable[[bytes], bool]
"""Takes data, and returns whether more is taken at once."""


class UpstreamError(Exception):
    """An engine could not be reached, or broke off. The message is for logs."""


class ConnectFailed(UpstreamError):
    """No connection: the request cannot have reached the engine."""


class Unanswered(ConnectFailed):
    """Nobody said whether there is a connection."""


class BrokenOff(UpstreamError):
    """The connection ended, or went against HTTP, before the answer was complete."""


class TimedOut(UpstreamError):
    """The engine stayed silent for longer than allowed."""


class TooLate(UpstreamError):
    """The request could not be dispatched before its ``dispatch_by``; it was not sent."""


class Timeouts:
    """Seconds for which an engine may be silent: before its answer begins, and within it."""

    def __init__(self, first_byte: float = 600.0, silence: float = 300.0) -> None:
        self.first_byte = first_byte
        self.silence = silence
        self.shorter = min(first_byte, silence)


_PATIENT = Timeouts()


class UpstreamRequest:
    """One request to one engine.

    ``origin`` is ``http://host:port`` with an optional path prefix. ``lines`` are the headers as they are sent, each
    with the end of its line, in any number of pieces. ``dispatch_by`` is an instant of the event loop's clock after
    which the request must not be sent any more.

    A cancelled request with ``settle_seconds`` is dispatched nevertheless, and its connection is closed only
    when its answer's body begins or that long after the dispatch: the engine has surely taken it up by then.

    ``on_late_answer`` is called with the status and body of an answer that an engine had given before it
    noticed that its request was cancelled.
    """

    def __init__(
        self,
        origin: str,
        method: str,
        path: str,
        lines: tuple[bytes, ...] = (),
        body: bytes = b"",
        timeouts: Timeouts = _PATIENT,
    ) -> None:
        self.origin = origin
        self.method = method
        self.path = path
        self.lines = lines
        self.body = body
        self.timeouts = timeouts
        self.dispatch_by: float | None = None
        self.settle_seconds = 0.0
        self.on_late_answer: Callable[[int, bytes], None] | None = None

    @property
    def headers(self) -> list[Header]:
        """What ``lines`` say, for who does not send them."""
        return headers_in(b"".join(self.lines))

    def waits(self, has_begun: bool) -> bool:
        """Whether a client waits for the first output of an answer, whose body ``has_begun`` or not."""
        return False

    def give_up(self) -> bool:
        """No client waits for it any more. Returns whether it is to end."""
        return True


class UpstreamResponse(Protocol):
    """An answer whose head has arrived. The names of its ``headers`` are in lower case.

    Whatever reads raises BrokenOff or TimedOut when there will be no proper end.
    """

    __slots__ = ()

    status: int
    headers: list[Header]

    @property
    def pieces(self) -> int:
        """In how many pieces its body has come so far, as the engine framed it: events of a stream."""
        return 0

    async def read(self) -> bytes:
        """All that has arrived since the last call, waiting for something; empty at the proper end of the answer."""
        ...

    def close(self) -> None:
        """Done with it. Closes the connection of an unfinished answer, which an engine takes as a
        cancellation.
        """
        ...

    async def pour(self, sink: Sink, chunk_sink: Sink | None = None) -> bool:
        """Give ``sink`` what arrives, in the very moment, until it returns false or the answer ends.

        A chunk that arrives alone, with whole events of JSON in it, may go to ``chunk_sink`` as HTTP/1.1 frames it.
        Returns false at the proper end of the answer.
        """
        while chunk := await self.read():
            if not sink(chunk):
                return True
        return False

    def arrived(self) -> bytes | None:
        """The rest of the answer, where all of it is there; otherwise it is to be read."""
        return None

    async def read_all(self) -> bytes:
        """The rest of the answer."""
        parts = []
        while chunk := await self.read():
            parts.append(chunk)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Upstream(Protocol):
    """A way to reach engines."""

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Dispatch ``request`` and wait for the head of its answer. Cancelling closes the connection.

        Raises ConnectFailed, TooLate, BrokenOff or TimedOut.
        """
        ...

    def forget(self, origin: str) -> None:
        """Nothing is sent to ``origin`` any more, and nothing under way there."""
        ...

    def heard_at(self, origin: str) -> float:
        """The instant of the event loop's clock at which anything came from ``origin`` last, as far as is known."""
        ...

    def give_up(self, origin: str) -> int:
        """Break off (TimedOut) what waits at ``origin`` for its first output, as far as it may end. Returns for how
        much nobody waits any more.
        """
        ...

    async def close(self) -> None: ...


async def read_soon(response: UpstreamResponse, seconds: float, most: int) -> bytes:
    """The rest of an answer for which nobody has more than so many ``seconds``, nor room for more than ``most`` bytes.
    Raises TimedOut or BrokenOff.
    """
    try:
        return await within(seconds, _read_at_most(response, most))
    except asyncio.TimeoutError:
        raise TimedOut(f"the answer did not end within {seconds:g} s") from None


async def _read_at_most(response: UpstreamResponse, most: int) -> bytes:
    parts = []
    while chunk := await response.read():
        parts.append(chunk)
        most -= len(chunk)
        if most < 0:
            raise BrokenOff("the answer is longer than any should be")
    return b"".join(parts)


def header(headers: Sequence[Header], name: bytes) -> bytes | None:
    """The first value of the header ``name``, which must be given in lower case."""
    for key, value in headers:
        if key == name:
            return value
    return None


def headers_in(lines: bytes) -> list[Header]:
    """What ``lines_of`` wrote."""
    pairs = (line.partition(b": ") for line in lines.splitlines())
    return [(name, value) for name, _, value in pairs]


def lines_of(headers: Iterable[Header]) -> bytes:
    """``headers`` as they are sent."""
    parts: list[bytes] = []
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    return b"".join(parts)
