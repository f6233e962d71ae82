"""The single attempts: one dispatch to a Decoder, or a Prefiller and then a Decoder."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schedloom.core.routing import SessionOwner
from schedloom.router.call import Call
from schedloom.router.failures import Failure
from schedloom.router.fleet import Fleet, Worker
from schedloom.router.headers import RANK_HEADER, REQUEST_ID_HEADER, answered
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

_PREFILLS_PER_REQUEST = 2


@dataclass(frozen=True, slots=True)
class Target:
    """An instance, the life it is in, and a rank of it."""

    worker: Worker
    rank: int
    owner: SessionOwner

    @classmethod
    def of(cls, worker: Worker, rank: int | None = None) -> Target:
        chosen = worker.least_busy_rank() if rank is None else rank
        return cls(worker, chosen, SessionOwner(worker.name, worker.contract.epoch, chosen))


@dataclass(frozen=True, slots=True)
class _Dispatch:
    """One request to one target."""

    target: Target
    request_id: str
    body: bytes
    dispatch_by: float | None = None


class Attempts:
    """Makes attempts. Each raises Failure while the client has nothing yet, or returns how it ended."""

    def __init__(
        self, upstream: Upstream, fleet: Fleet, suspect: Callable[[Worker], None], settings: RouterSettings
    ) -> None:
        self._upstream = upstream
        self._fleet = fleet
        self._suspect = suspect
        self._settings = settings
        self._engine_authorization = _bearer(settings)

    async def append(self, call: Call, reply: Reply, target: Target) -> Outcome:
        """Ask a Decoder to reuse what it holds; it may turn the request away."""
        dispatch = _Dispatch(target, new_request_id(), call.body.for_local_attempt())
        return await self._generate(call, reply, dispatch, "append", local=True)

    async def decode(self, call: Call, reply: Reply, target: Target | None = None) -> Outcome:
        """Have one Decoder do everything."""
        target = target or Target.of(self._fleet.choose_decoder())
        dispatch = _Dispatch(target, new_request_id(), call.body.raw)
        return await self._generate(call, reply, dispatch, "decode")

    async def prefill_decode(
        self, call: Call, reply: Reply, decision: str, target: Target | None = None
    ) -> Outcome:
        """Have a Prefiller compute the prompt's KV, and a Decoder pull it and answer.

        A hand-over that comes too late for the Prefiller's lease is not made: the prefill is repeated, once.
        """
        for _ in range(_PREFILLS_PER_REQUEST):
            self._fleet.require_decoder()
            request_id = new_request_id()
            parameters = await self._prefill(call, request_id)
            dispatch_by = self._now() + self._settings.handoff_timeout_seconds
            chosen = target or Target.of(self._fleet.choose_decoder())
            dispatch = _Dispatch(chosen, request_id, call.body.for_decoder(parameters), dispatch_by)
            try:
                return await self._generate(call, reply, dispatch, decision)
            except TooLate:
                log.warning("%s: the Decoder was not reached in time", request_id)
        raise Failure.own(
            504, "The Decoder could not be reached in time after the prefill.", "handoff_timeout"
        )

    async def _prefill(self, call: Call, request_id: str) -> dict[str, Any]:
        """The transfer parameters for the Decoder. Raises Failure with the Prefiller's own error."""
        target = Target.of(self._fleet.choose_prefiller())
        request = self._request(call, _Dispatch(target, request_id, call.body.for_prefiller()))
        with target.worker.serving(target.rank):
            try:
                response = await self._upstream.send(request)
                try:
                    body = await read_all(response)
                finally:
                    response.close()
            except UpstreamError as error:
                raise self._unreachable(target.worker, "Prefiller", error) from error
        if response.status != 200:
            raise Failure(response.status, body, answered(response.headers))
        parameters = parsed(body).get("kv_transfer_params")
        if not isinstance(parameters, dict) or not parameters:
            message = "The Prefiller answered without transfer parameters; it does not run as a KV producer."
            raise Failure.own(502, message, "no_transfer_parameters")
        return parameters

    async def _generate(
        self, call: Call, reply: Reply, dispatch: _Dispatch, decision: str, *, local: bool = False
    ) -> Outcome:
        worker = dispatch.target.worker
        reply.about(decision, dispatch.request_id, dispatch.target.owner)
        with worker.serving(dispatch.target.rank):
            try:
                response = await self._upstream.send(self._request(call, dispatch))
                try:
                    return await relay(response, reply, local=local)
                finally:
                    response.close()
            except TooLate:
                raise
            except UpstreamError as error:
                failure = self._unreachable(worker, "Decoder", error)
                if not reply.started:
                    raise failure from error
                await reply.break_off("The engine broke off its answer.", "incomplete_answer")
                return Outcome.BROKEN

    def _request(self, call: Call, dispatch: _Dispatch) -> UpstreamRequest:
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
        )

    def _headers(self, call: Call, dispatch: _Dispatch) -> list[Header]:
        headers = [
            (b"content-type", b"application/json"),
            (REQUEST_ID_HEADER, dispatch.request_id.encode()),
            *call.session_header,
            *call.headers.tracing,
        ]
        if dispatch.target.worker.contract.data_parallel_size > 1:
            headers.append((RANK_HEADER, b"%d" % dispatch.target.rank))
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

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def new_request_id() -> str:
    return uuid.uuid4().hex


def _bearer(settings: RouterSettings) -> bytes | None:
    key = settings.engine_api_key
    return b"Bearer " + key.get_secret_value().encode() if key else None
