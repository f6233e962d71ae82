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
from schedloom.router.sse import parsed
from schedloom.router.upstream import (
    ConnectFailed,
    Header,
    TimedOut,
    TooLate,
    Upstream,
    UpstreamError,
    UpstreamRequest,
    read_all,
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Dispatch:
    """One request to one target; ``dispatch_by`` is set where it hands KV over.

    A hand-over is always made, even for a client that has left: a Prefiller keeps KV until a Decoder took it.
    """

    target: Target
    request_id: str
    body: bytes
    dispatch_by: float | None = None
    on_late_answer: Callable[[int, bytes], None] | None = None


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
        """A Prefiller's whole answer. Raises Failure with the Prefiller's own error."""
        worker = dispatch.target.worker
        with self._lessons.serving(call, dispatch.target, Leg.PREFILL) as service:
            try:
                response = service.answered(await self._upstream.send(self._request(call, dispatch)))
                try:
                    body = await read_all(response)
                finally:
                    response.close()
            except UpstreamError as error:
                service.failed()
                raise self._unreachable(worker, "Prefiller", error) from error
        if response.status != 200:
            raise Failure(response.status, body, answered(response.headers))
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
                await read_all(response)
            finally:
                response.close()

    def handoff_deadline(self) -> float:
        """The last instant to dispatch what a Prefiller keeps KV for from now on."""
        return asyncio.get_running_loop().time() + self._settings.handoff_timeout_seconds

    def _request(self, call: Call, dispatch: Dispatch) -> UpstreamRequest:
        target = dispatch.target
        return UpstreamRequest(
            target.worker.origin,
            "POST",
            call.path,
            self._headers(call, dispatch),
            dispatch.body,
            first_byte_timeout=self._settings.first_byte_timeout_seconds,
            silence_timeout=self._settings.silence_timeout_seconds,
            dispatch_by=dispatch.dispatch_by,
            on_late_answer=dispatch.on_late_answer,
            settle_seconds=0.0 if dispatch.dispatch_by is None else self._settings.handoff_settle_seconds,
        )

    def _headers(self, call: Call, dispatch: Dispatch) -> list[Header]:
        if call.common_headers is None:
            call.common_headers = self._common_headers(call)
        headers = [*call.common_headers, (REQUEST_ID_HEADER, dispatch.request_id.encode())]
        if dispatch.target.worker.contract.data_parallel_size > 1:
            headers.append((RANK_HEADER, b"%d" % dispatch.target.rank))
        return headers

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
            return Failure.own(503, f"The {kind} could not be reached.", "engine_unreachable")
        if isinstance(error, TimedOut):
            return Failure.own(504, f"The {kind} did not answer in time.", "engine_timeout")
        return Failure.own(502, f"The {kind} broke off before its answer was complete.", "engine_broke_off")


def transfer_parameters(body: bytes) -> dict[str, Any] | None:
    """What an engine's JSON answer says about the KV that it keeps."""
    parameters = parsed(body).get("kv_transfer_params")
    return parameters if isinstance(parameters, dict) and parameters else None


def _bearer(settings: RouterSettings) -> bytes | None:
    key = settings.engine_api_key
    return b"Bearer " + key.get_secret_value().encode() if key else None
