"""Single requests to single engines: what they carry, and what becomes of their answers and errors."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from schedloom.core.continuation import CONTINUABLE_KEY
from schedloom.core.routing import Leg
from schedloom.router.failures import Failure
from schedloom.router.fleet.worker import Service, Target, Worker
from schedloom.router.http.upstream import (
    ConnectFailed,
    TimedOut,
    Timeouts,
    TooLate,
    Upstream,
    UpstreamError,
    UpstreamRequest,
    lines_of,
)
from schedloom.router.keys import KEY_REFUSED, about_refused_key, engine_authorization
from schedloom.router.learning import Lessons
from schedloom.router.relay import Outcome, failure_of, relay
from schedloom.router.reply import Reply
from schedloom.router.requests.call import Call
from schedloom.router.requests.headers import RANK_HEADER, REQUEST_ID_HEADER, SESSION_HEADER, session_value
from schedloom.router.settings import RouterSettings
from schedloom.router.sse import tells_an_error
from schedloom.router.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_Read = TypeVar("_Read")

_REQUEST_ID = REQUEST_ID_HEADER + b": "


class Dispatch(Service, UpstreamRequest):
    """One request to one target, which counts there while it is served.

    ``dispatch_by`` is set where it hands KV over. Such a request is made even for a client that has left, and for
    ``settle_seconds`` or until its answer's body begins the client's leaving is kept from the engine: somebody else
    keeps KV, or waits, until the engine took it up. ``sent`` and ``status`` tell how far it came. ``reply`` is what its
    answer goes to. One that ``goes_on`` does so whoever waits or not; ``on_given_up`` tells whether this one ends.
    """

    reply: Reply | None = None
    goes_on = False
    on_given_up: Callable[[], bool] | None = None

    def __init__(self, call: Call, target: Target, request_id: str, body: bytes, timeouts: Timeouts) -> None:
        self.origin = target.worker.origin
        self.method = "POST"
        self.path = call.path
        self.lines = (call.lines, _REQUEST_ID, request_id.encode(), b"\r\n")
        self.body = body
        self.timeouts = timeouts
        self.dispatch_by = None
        self.settle_seconds = 0.0
        self.on_late_answer = None
        self.worker = target.worker
        self.rank = target.rank
        self.size = call.body_bytes
        self.success = None
        self.target = target
        self.request_id = request_id
        self.on_accepted: Callable[[], None] | None = None
        self.sent = False
        self.status = 0

    def waits(self, has_begun: bool) -> bool:
        if self.goes_on:
            return False
        return not has_begun or self.reply is None or not self.reply.started

    def give_up(self) -> bool:
        self.goes_on = self.on_given_up is not None and not self.on_given_up()
        return not self.goes_on

    def abandon(self) -> None:
        """Nobody waits for the engine any more: when it is cancelled, its connection closes at once."""
        self.settle_seconds = 0.0


class Unreached(Failure):
    """The request cannot have come to the engine."""


class Interrupted(Failure):
    """The engine was reached and then lost: what it still does for the request is not known."""


def timed_out(kind: str, culprit: Worker | None = None) -> Failure:
    failure = Interrupted.own(504, f"The {kind} did not answer in time.", "engine_timeout")
    failure.culprit = culprit
    return failure


class Dispatcher:
    """Sends requests to engines. Raises Failure while the client has nothing yet."""

    def __init__(
        self,
        upstream: Upstream,
        lessons: Lessons,
        suspect: Callable[[Worker], None],
        settings: RouterSettings,
        metrics: Metrics,
    ) -> None:
        self._upstream = upstream
        self._metrics = metrics
        self._lessons = lessons
        self._suspect = suspect
        self.patience = max(settings.first_byte_timeout_seconds, settings.silence_timeout_seconds)
        """Seconds to wait for an engine that waits for another: that is to answer only when it has done its part."""
        self._timeouts = Timeouts(settings.first_byte_timeout_seconds, settings.silence_timeout_seconds)
        self.for_one_that_waits = Timeouts(settings.first_byte_timeout_seconds, self.patience)
        self._handoff_seconds = settings.handoff_timeout_seconds
        self._settle_seconds = settings.handoff_settle_seconds
        self._forwards_authorization = settings.forward_authorization
        self._engine_authorization = engine_authorization(settings)
        self._lines = b"content-type: application/json\r\n"
        if self._engine_authorization is not None and not self._forwards_authorization:
            self._lines += b"authorization: %b\r\n" % self._engine_authorization

    async def prefill(self, call: Call, dispatch: Dispatch, read: Callable[[bytes], _Read]) -> _Read:
        """What ``read`` finds in a Prefiller's whole answer, streamed or not. Raises Failure with the Prefiller's own
        error, or with that of ``read``.
        """
        service: Service = dispatch
        if call.trace is not None or self._lessons.are_wanted:
            service = self._lessons.observed(call, dispatch, Leg.PREFILL)
        with service:
            asked_at = time.perf_counter()
            try:
                dispatch.sent = True
                response = service.answered(await self._upstream.send(dispatch))
                if response.status == 200 and dispatch.on_accepted is not None:
                    dispatch.on_accepted()
                try:
                    body = response.arrived()
                    if body is None:
                        body = await response.read_all()
                finally:
                    response.close()
            except UpstreamError as error:
                service.failed()
                raise self._unreachable(dispatch, "Prefiller", error) from error
            if response.status != 200:
                self._check_key(response.status, dispatch, service, "Prefiller")
                raise failure_of(response, body)
            if not body.startswith(b"{") and tells_an_error(body):
                raise Failure.own(502, "The Prefiller failed.", "prefill_failed")
            self._metrics.prefilled(asked_at)
            return read(body)

    async def generate(
        self, call: Call, reply: Reply, dispatch: Dispatch, decision: str, *, local: bool = False
    ) -> Outcome:
        """Have a Decoder answer the client."""
        marked = CONTINUABLE_KEY in call.marks and dispatch.worker.resumes
        reply.decision, reply.request_id, reply.owner = decision, dispatch.request_id, dispatch.target.owner
        dispatch.reply = reply
        service: Service = dispatch
        if call.trace is not None or self._lessons.are_wanted:
            service = self._lessons.observed(call, dispatch, Leg.APPEND if local else Leg.DECODE)
        with service:
            reply.asked_at = time.perf_counter()
            try:
                dispatch.sent = True
                response = service.answered(await self._upstream.send(dispatch))
                dispatch.status = response.status
                try:
                    return await relay(response, reply, local=local or call.resumes, marked=marked)
                finally:
                    response.close()
            except TooLate:
                reply.owner = None
                raise
            except Failure as refusal:
                self._check_key(refusal.status, dispatch, service, "Decoder")
                raise
            except UpstreamError as error:
                service.failed()
                failure = self._unreachable(dispatch, "Decoder", error)
                if not reply.started:
                    reply.owner = None
                    raise failure from error
                await reply.break_off("The engine broke off its answer.", "incomplete_answer")
                return Outcome.BROKEN

    async def deliver(self, dispatch: Dispatch) -> None:
        """Send what nobody waits for the answer of. Raises UpstreamError."""
        dispatch.goes_on = True
        with dispatch.target.worker.serving(dispatch.target.rank):
            dispatch.sent = True
            response = await self._upstream.send(dispatch)
            dispatch.status = response.status
            try:
                await response.read_all()
            finally:
                response.close()

    def hand_over(self, call: Call, target: Target, request_id: str, body: bytes) -> Dispatch:
        """To be made while a Prefiller keeps the KV, which it does from now on."""
        dispatch = self.dispatch(call, target, request_id, body)
        dispatch.dispatch_by = self._loop.time() + self._handoff_seconds
        dispatch.settle_seconds = self._settle_seconds
        return dispatch

    @functools.cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def dispatch(self, call: Call, target: Target, request_id: str, body: bytes) -> Dispatch:
        if not call.lines:
            call.lines = self._common_lines(call)
        dispatch = Dispatch(call, target, request_id, body, self._timeouts)
        if len(target.worker.targets) > 1:
            dispatch.lines += (lines_of([(RANK_HEADER, b"%d" % target.rank)]),)
        return dispatch

    def _common_lines(self, call: Call) -> bytes:
        """The headers that every attempt of a call carries."""
        lines = self._lines
        if call.session is not None:
            lines += b"%b: %b\r\n" % (SESSION_HEADER, session_value(call.session))
        if call.headers.tracing:
            lines += lines_of(call.headers.tracing if call.trace is None else call.headers.trace_state)
        if self._forwards_authorization and call.headers.authorization is not None:
            lines += b"authorization: %b\r\n" % call.headers.authorization
        return lines

    def _check_key(self, status: int, dispatch: Dispatch, service: Service, kind: str) -> None:
        """Raises Failure (502) for a refused key, which is the client's own only where that is forwarded."""
        if status not in KEY_REFUSED or self._forwards_authorization:
            return
        service.failed()
        self._complain_of_key(dispatch.target, status)
        message = f"The {kind} refused the router's key; whoever runs the router can mend that, its clients cannot."
        raise Failure.own(502, message, "engine_refused_key")

    def _complain_of_key(self, target: Target, status: int) -> None:
        """Once for each life of an engine."""
        if target.worker.refused_in != target.owner.epoch:
            target.worker.refused_in = target.owner.epoch
            log.warning(about_refused_key(target.name, self._engine_authorization, status))

    def _unreachable(self, dispatch: Dispatch, kind: str, error: UpstreamError) -> Failure:
        worker = dispatch.target.worker
        log.warning("%s: %s (request %s)", worker.name, error, dispatch.request_id)
        self._suspect(worker)
        if isinstance(error, ConnectFailed):
            return Unreached.own(503, f"The {kind} could not be reached.", "engine_unreachable")
        if isinstance(error, TimedOut):
            return timed_out(kind)
        return Interrupted.own(502, f"The {kind} broke off before its answer was complete.", "engine_broke_off")


def was_refused(dispatch: Dispatch, error: BaseException | None) -> bool:
    """Whether a Decoder surely does not take the KV over that it was told of."""
    if not dispatch.sent or isinstance(error, (TooLate, Unreached)):
        return True
    told = error.status if isinstance(error, Failure) and not isinstance(error, Interrupted) else 0
    return any(400 <= status < 500 or status == 503 for status in (dispatch.status, told))
