"""Single requests to single engines: what they carry, and what becomes of their answers and errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schedloom.core.continuation import CONTINUABLE_KEY
from schedloom.core.routing import Leg
from schedloom.router.call import Call
from schedloom.router.failures import Failure
from schedloom.router.fleet import Target, Worker
from schedloom.router.headers import RANK_HEADER, REQUEST_ID_HEADER, SESSION_HEADER, answered, session_value
from schedloom.router.learning import Lessons
from schedloom.router.relay import Outcome, relay
from schedloom.router.reply import Reply
from schedloom.router.settings import RouterSettings
from schedloom.router.sse import parsed, tells_an_error
from schedloom.router.upstream import (
    ConnectFailed,
    Header,
    TimedOut,
    TooLate,
    Upstream,
    UpstreamError,
    UpstreamRequest,
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Dispatch:
    """One request to one target.

    ``dispatch_by`` is set where it hands KV over. Such a request is made even for a client that has left, and for
    ``settle_seconds`` or until its answer's body begins the client's leaving is kept from the engine: somebody else
    keeps KV, or waits, until the engine took it up. An engine that is to answer only when another has done its part is
    waited for with patience. ``sent`` and ``status`` tell how far it came.
    """

    target: Target
    request_id: str
    body: bytes
    dispatch_by: float | None = None
    settle_seconds: float = 0.0
    patient: bool = False
    on_accepted: Callable[[], None] | None = None
    on_late_answer: Callable[[int, bytes], None] | None = None
    sent: UpstreamRequest | None = None
    status: int = 0

    def abandon(self) -> None:
        """Nobody waits for the engine any more: when it is cancelled, its connection closes at once."""
        if self.sent is not None:
            self.sent.settle_seconds = 0.0


class Unreached(Failure):
    """The request cannot have come to the engine."""


class Interrupted(Failure):
    """The engine was reached and then lost: what it still does for the request is not known."""


class Dispatcher:
    """Sends requests to engines. Raises Failure while the client has nothing yet."""

    def __init__(
        self, upstream: Upstream, lessons: Lessons, suspect: Callable[[Worker], None], settings: RouterSettings
    ) -> None:
        self._upstream = upstream
        self._lessons = lessons
        self._suspect = suspect
        self._settings = settings
        self._engine_authorization = _bearer(settings)

    async def prefill(self, call: Call, dispatch: Dispatch) -> bytes:
        """A Prefiller's whole answer, streamed or not. Raises Failure with the Prefiller's own error."""
        worker = dispatch.target.worker
        with self._lessons.serving(call, dispatch.target, Leg.PREFILL) as service:
            try:
                response = service.answered(await self._upstream.send(self._request(call, dispatch)))
                if response.status == 200 and dispatch.on_accepted is not None:
                    dispatch.on_accepted()
                try:
                    body = await response.read_all()
                finally:
                    response.close()
            except UpstreamError as error:
                service.failed()
                raise self._unreachable(worker, "Prefiller", error) from error
        if response.status != 200:
            raise Failure(response.status, body, answered(response.headers))
        if not body.startswith(b"{") and tells_an_error(body):
            raise Failure.own(502, "The Prefiller failed.", "prefill_failed")
        return body

    async def generate(
        self, call: Call, reply: Reply, dispatch: Dispatch, decision: str, *, local: bool = False
    ) -> Outcome:
        """Have a Decoder answer the client."""
        worker = dispatch.target.worker
        marked = CONTINUABLE_KEY in call.marks_for(worker)
        reply.about(decision, dispatch.request_id, dispatch.target.owner)
        with self._lessons.serving(call, dispatch.target, Leg.APPEND if local else Leg.DECODE) as service:
            try:
                response = service.answered(await self._upstream.send(self._request(call, dispatch)))
                dispatch.status = response.status
                try:
                    return await relay(response, reply, local=local or call.resumes, marked=marked)
                finally:
                    response.close()
            except TooLate:
                raise
            except UpstreamError as error:
                service.failed()
                failure = self._unreachable(worker, "Decoder", error)
                if not reply.started:
                    raise failure from error
                await reply.break_off("The engine broke off its answer.", "incomplete_answer")
                return Outcome.BROKEN

    async def deliver(self, call: Call, dispatch: Dispatch) -> None:
        """Send what nobody waits for the answer of. Raises UpstreamError."""
        with dispatch.target.worker.serving(dispatch.target.rank):
            response = await self._upstream.send(self._request(call, dispatch))
            try:
                await response.read_all()
            finally:
                response.close()

    @property
    def patience(self) -> float:
        """Seconds to wait for an engine that waits for another."""
        return max(self._settings.first_byte_timeout_seconds, self._settings.silence_timeout_seconds)

    def hand_over(self, target: Target, request_id: str, body: bytes) -> Dispatch:
        """To be made while a Prefiller keeps the KV, which it does from now on."""
        dispatch_by = asyncio.get_running_loop().time() + self._settings.handoff_timeout_seconds
        return Dispatch(target, request_id, body, dispatch_by, self._settings.handoff_settle_seconds)

    def _request(self, call: Call, dispatch: Dispatch) -> UpstreamRequest:
        settings, worker = self._settings, dispatch.target.worker
        if call.common_headers is None:
            call.common_headers = self._common_headers(call)
        headers = [*call.common_headers, (REQUEST_ID_HEADER, dispatch.request_id.encode())]
        if len(worker.targets) > 1:
            headers.append((RANK_HEADER, b"%d" % dispatch.target.rank))
        dispatch.sent = UpstreamRequest(
            worker.origin,
            "POST",
            call.path,
            headers,
            dispatch.body,
            settings.first_byte_timeout_seconds,
            self.patience if dispatch.patient else settings.silence_timeout_seconds,
            dispatch.dispatch_by,
            dispatch.settle_seconds,
            dispatch.on_late_answer,
        )
        return dispatch.sent

    def _common_headers(self, call: Call) -> list[Header]:
        """What every attempt of a call carries."""
        headers = [(b"content-type", b"application/json"), *call.headers.tracing]
        if call.session is not None:
            headers.append((SESSION_HEADER, session_value(call.session)))
        authorization = self._engine_authorization
        if self._settings.forward_authorization:
            authorization = call.headers.authorization
        if authorization is not None:
            headers.append((b"authorization", authorization))
        return headers

    def _unreachable(self, worker: Worker, kind: str, error: UpstreamError) -> Failure:
        log.warning("%s: %s", worker.name, error)
        self._suspect(worker)
        if isinstance(error, ConnectFailed):
            return Unreached.own(503, f"The {kind} could not be reached.", "engine_unreachable")
        if isinstance(error, TimedOut):
            return Interrupted.own(504, f"The {kind} did not answer in time.", "engine_timeout")
        return Interrupted.own(502, f"The {kind} broke off before its answer was complete.", "engine_broke_off")


def transfer_parameters(body: bytes) -> dict[str, Any] | None:
    """What an engine's JSON answer says about the KV that it keeps."""
    parameters = parsed(body).get("kv_transfer_params")
    return parameters if isinstance(parameters, dict) and parameters else None


def _bearer(settings: RouterSettings) -> bytes | None:
    key = settings.engine_api_key
    return b"Bearer " + key.get_secret_value().encode() if key else None
