"""From an engine's answer to the client's."""

from __future__ import annotations

import contextlib
from enum import Enum
from typing import Any

import orjson

from schedloom.router.failures import Failure
from schedloom.router.headers import answered
from schedloom.router.opening import Beginning, StreamOpening, rejection_in
from schedloom.router.reply import Reply
from schedloom.router.sse import EventFramer, parsed, tells_an_error, without_transfer_parameters
from schedloom.router.upstream import UpstreamError, UpstreamResponse, header, read_all


class Outcome(Enum):
    """SERVED: the client has a complete answer. REJECTED: a Decoder turned a local attempt away, nothing
    reached the client. BROKEN: output had begun, and ended in an error that the client was told.
    """

    SERVED = "served"
    REJECTED = "rejected"
    BROKEN = "broken"


async def relay(response: UpstreamResponse, reply: Reply, *, local: bool) -> Outcome:
    """Hand an engine's answer to the client, unless it is the rejection of a ``local`` attempt.

    Raises Failure, with nothing delivered, for an engine's error; UpstreamError when the engine breaks off.
    """
    if response.status != 200:
        raise Failure(response.status, await read_all(response), answered(response.headers))
    if (header(response.headers, b"content-type") or b"").startswith(b"text/event-stream"):
        return await _Stream(response, reply, local).relay()
    return await _relay_whole(response, reply, local)


async def _relay_whole(response: UpstreamResponse, reply: Reply, local: bool) -> Outcome:
    body = await read_all(response)
    if local and rejection_in(body) is not None:
        return Outcome.REJECTED
    await reply.succeed()
    await reply.whole(200, answered(response.headers), _without_transfer_parameters(body))
    return Outcome.SERVED


def _without_transfer_parameters(body: bytes) -> bytes:
    if b'"kv_transfer_params"' not in body:
        return body
    fields = parsed(body)
    if fields.get("kv_transfer_params") is None:
        return body
    return orjson.dumps({**fields, "kv_transfer_params": None})


class _Stream:
    """One stream on its way through: held back until it is known to be an answer, then passed on event by
    event.
    """

    def __init__(self, response: UpstreamResponse, reply: Reply, local: bool) -> None:
        self._response = response
        self._reply = reply
        self._opening = StreamOpening(local=local)
        self._framer = EventFramer()
        self._told_an_error = False

    async def relay(self) -> Outcome:
        events = await self._open()
        if events is None:
            return Outcome.REJECTED
        await self._reply.start_stream(answered(self._response.headers))
        while not self._reply.dialect.ends(events):
            if events:
                await self._reply.write(self._checked(events))
            chunk = await self._response.read()
            if not chunk:
                return await self._end_early()
            events = self._framer.feed(chunk)
        return await self._end(self._checked(events))

    async def _open(self) -> bytes | None:
        """The events held back until an answer began; ``None`` for a rejection."""
        held = b""
        while True:
            events = await self._next_events()
            beginning = self._opening.judge(events)
            held += events
            if beginning is Beginning.REJECTED:
                await self._drain()
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
        return without_transfer_parameters(events)

    async def _end(self, events: bytes) -> Outcome:
        if not self._told_an_error:
            await self._reply.succeed()
        await self._reply.end(events)
        await self._drain()
        return Outcome.BROKEN if self._told_an_error else Outcome.SERVED

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


def _failure_in(fields: dict[str, Any]) -> Failure:
    """An error that a stream began with, with the status that it would have had without streaming."""
    error = fields.get("error")
    code = error.get("code") if isinstance(error, dict) else fields.get("code")
    status = code if isinstance(code, int) and 400 <= code <= 599 else 502
    return Failure(status, orjson.dumps(fields))
