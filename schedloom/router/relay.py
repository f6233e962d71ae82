"""From an engine's answer to the client's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable
from enum import Enum
from typing import Any

import orjson

from schedloom.core.continuation import HandBack
from schedloom.router.continuation.story import Story, handed_back, handed_back_in
from schedloom.router.continuation.told import Differs
from schedloom.router.failures import Failure
from schedloom.router.http.chunks import data_of
from schedloom.router.http.upstream import Sink, UpstreamError, UpstreamResponse, header
from schedloom.router.opening import Beginning, StreamOpening, rejection_in
from schedloom.router.reply import Reply
from schedloom.router.requests.headers import answered, answered_lines
from schedloom.router.sse import EventFramer, tells_an_error
from schedloom.router.transfer.redaction import TRANSFER_KEY, redacted_answer, redacted_events


class Outcome(Enum):
    """SERVED: the client has a complete answer. REJECTED: a Decoder turned a local attempt away, nothing of it
    reached the client. HANDED_BACK: a Decoder gave a marked request back, which goes on elsewhere. BROKEN: output had
    begun, and ended in an error that the client was told.
    """

    SERVED = "served"
    REJECTED = "rejected"
    HANDED_BACK = "handed_back"
    BROKEN = "broken"


def relay(response: UpstreamResponse, reply: Reply, *, local: bool, marked: bool = False) -> Awaitable[Outcome]:
    """Hand an engine's answer to the client, unless it is the rejection of a ``local`` attempt, or gives a ``marked``
    request back.

    Raises Failure, with nothing of it delivered, for an engine's error; UpstreamError when the engine breaks off.
    """
    if response.status != 200:
        return _failed(response)
    if marked and reply.story is None:
        reply.story = Story()
    if (header(response.headers, b"content-type") or b"").startswith(b"text/event-stream"):
        return _Stream(response, reply, local, marked).relay()
    return _relay_whole(response, reply, local, marked)


async def _failed(response: UpstreamResponse) -> Outcome:
    raise failure_of(response, await response.read_all())


def failure_of(response: UpstreamResponse, body: bytes) -> Failure:
    """What an engine says in place of an answer. Errors alone travel as they came: anything else, as a redirection, is
    no business of a client.
    """
    if not 400 <= response.status <= 599:
        return Failure.own(502, "The engine answered with neither output nor an error.", "unexpected_status")
    return Failure(response.status, body, answered(response.headers))


async def _relay_whole(response: UpstreamResponse, reply: Reply, local: bool, marked: bool) -> Outcome:
    body = response.arrived()
    if body is None:
        body = await response.read_all()
    story = reply.story
    reason = rejection_in(body) if local else None
    if reason is not None:
        return _rejected(story, reason)
    hand_back = handed_back(body) if marked else None
    if story is not None and hand_back is not None:
        story.hand_back = hand_back
        return Outcome.HANDED_BACK
    if reply.started:
        raise Failure.own(502, "The engine did not answer with a stream.", "not_a_stream")
    if reply.turn is not None:
        body = reply.turn.whole(body)
    if (recording := reply.succeed()) is not None:
        await recording
    if not reply.whole(200, answered_lines(response.headers), redacted_answer(body)):
        await reply.drained()
    return Outcome.SERVED


def _rejected(story: Story | None, reason: str) -> Outcome:
    if story is not None:
        story.refusal = reason
    return Outcome.REJECTED


class _Stream:
    """One stream on its way through: held back until it is known to be an answer, then passed on event by
    event.
    """

    def __init__(self, response: UpstreamResponse, reply: Reply, local: bool, marked: bool) -> None:
        self._response = response
        self._reply = reply
        self._local = local
        self._marked = marked
        self._opening = StreamOpening(local=local or marked)
        self._framer = EventFramer()
        self._told_an_error = False
        self._is_plain = reply.story is None and reply.turn is None
        self._last: bytes | None = None
        self._hand_back: tuple[bytes, HandBack] | None = None
        self._began_at: float | None = None
        self._pieces = 0

    async def relay(self) -> Outcome:
        try:
            return await self._relay()
        except Differs as difference:
            message = f"The answer could not be continued on another engine: {difference}."
            await self._reply.break_off(message, "continuation_differs")
            return Outcome.BROKEN

    async def _relay(self) -> Outcome:
        events = await self._open()
        if events is None:
            return await self._without_output()
        self._pass_on(events)
        while True:
            if self._hand_back is not None:
                return await self._give_back(*self._hand_back)
            if self._last is not None:
                return await self._end(self._last)
            await self._reply.drained()
            if not await self._response.pour(self._take, self._chunk_sink()):
                return await self._end_early()

    def _take(self, chunk: bytes) -> bool:
        """Returns whether more can follow at once. Most chunks are whole events with nothing to do about them."""
        if self._is_plain and not self._framer.rest and chunk.endswith(b"}\n\n") and not _is_special(chunk):
            return self._reply.write(chunk)
        events = self._framer.feed(chunk)
        return not events or self._pass_on(events)

    def _chunk_sink(self) -> Sink | None:
        write = self._reply.chunk_writer() if self._is_plain else None
        return None if write is None else _Passage(write, self._framer, self._take).forward

    def _pass_on(self, events: bytes) -> bool:
        if self._marked:
            self._hand_back = handed_back_in(events)
        if self._reply.dialect.ends(events):
            self._last = events
        return self._hand_back is None and self._last is None and self._deliver(events)

    async def _give_back(self, events: bytes, hand_back: HandBack) -> Outcome:
        """What came with the hand-back itself is told again by the engine that continues."""
        assert self._reply.story is not None, "marked requests have one"
        self._reply.story.hand_back = hand_back
        if events and self._reply.started:
            self._deliver(events)
            await self._reply.drained()
        await self._drain()
        return Outcome.HANDED_BACK

    async def _without_output(self) -> Outcome:
        """A rejection; or a hand-back before any output, whose finish chunk the engine dropped."""
        await self._drain()
        return _rejected(self._reply.story, self._opening.reason) if self._local else Outcome.HANDED_BACK

    def _deliver(self, events: bytes) -> bool:
        events = self._checked(events)
        if not self._reply.started:
            self._start()
        return not events or self._reply.write(events)

    def _start(self) -> None:
        self._began_at, self._pieces = time.perf_counter(), self._response.pieces
        self._reply.start_stream(answered_lines(self._response.headers))

    async def _open(self) -> bytes | None:
        """The events held back until an answer began; ``None`` for an end without any output."""
        held = b""
        while True:
            events = await self._next_events()
            beginning = self._opening.judge(events)
            held += events
            if beginning is Beginning.REJECTED:
                return None
            if beginning is Beginning.ERROR:
                raise _failure_in(self._opening.error)
            if beginning is Beginning.ANSWER:
                return held

    async def _next_events(self) -> bytes:
        while chunk := await self._response.read():
            if events := self._framer.feed(chunk):
                return events
        raise Failure.own(502, "The engine ended its answer before it began.", "empty_answer")

    def _checked(self, events: bytes) -> bytes:
        if tells_an_error(events):
            self._told_an_error = True
        if self._reply.turn is not None:
            events = self._reply.turn.events(events)
        events = redacted_events(events)
        return events if self._reply.story is None else self._reply.story.news_in(events)

    async def _end(self, events: bytes) -> Outcome:
        events = self._checked(events)
        if not self._reply.started:
            self._start()
        if not self._told_an_error and (recording := self._reply.succeed()) is not None:
            await recording
        self._reply.pace = self._pace()
        await self._reply.end(events)
        await self._drain()
        return Outcome.BROKEN if self._told_an_error else Outcome.SERVED

    def _pace(self) -> float | None:
        """Between the events of a stream that this engine began, its end mark apart."""
        gaps = self._response.pieces - self._pieces - 1
        return None if self._began_at is None or gaps < 1 else (time.perf_counter() - self._began_at) / gaps

    async def _end_early(self) -> Outcome:
        if self._told_an_error:
            await self._reply.end()
        else:
            await self._reply.break_off("The engine ended its answer early.", "incomplete_answer")
        return Outcome.BROKEN

    async def _drain(self) -> None:
        """To the end of the engine's answer, so that its connection serves the next request."""
        with contextlib.suppress(UpstreamError):
            while await self._response.read():
                pass


class _Passage:
    """For chunks that the client gets as the engine framed them. ``take`` gets the data of the others.

    Small, because it is what a stream with little else to do goes through with each event. What is called is read from
    its slots first, since Python 3.11 is slow at both in one.
    """

    __slots__ = ("_framer", "_take", "_write")

    def __init__(self, write: Sink, framer: EventFramer, take: Sink) -> None:
        self._write = write
        self._framer = framer
        self._take = take

    def forward(self, chunk: bytes) -> bool:
        if self._framer.rest or _is_special(chunk):
            take = self._take
            return take(data_of(chunk))
        write = self._write
        return write(chunk)


def _is_special(events: bytes) -> bytes:
    """Whether there is anything to do about JSON ``events``: true, as bytes are, when not empty.

    Not with ``in``, which makes and drops an exception for each question, nor with ``find``, which reads its arguments
    for longer than it searches.
    """
    part = events.partition
    return part(b'"error"')[1] or part(b"event:")[1] or part(TRANSFER_KEY)[1]


def _failure_in(fields: dict[str, Any]) -> Failure:
    """An error that a stream began with, with the status that it would have had without streaming."""
    error = fields.get("error")
    code = error.get("code") if isinstance(error, dict) else fields.get("code")
    status = code if isinstance(code, int) and 400 <= code <= 599 else 502
    return Failure(status, orjson.dumps(fields))
