"""The single attempts: one dispatch to a Decoder, or a Prefiller and then a Decoder."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from schedloom.core.routing import Leg
from schedloom.router.breaker import Clock, RetryBudget
from schedloom.router.call import Call, new_request_id
from schedloom.router.failures import Failure
from schedloom.router.fleet import Fleet, Target, Worker
from schedloom.router.headers import RANK_HEADER, REQUEST_ID_HEADER, SESSION_HEADER, answered, session_value
from schedloom.router.learning import Lessons
from schedloom.router.metrics import Metrics
from schedloom.router.relay import Outcome, relay
from schedloom.router.reply import Reply
from schedloom.router.selection import Selection
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
class _Dispatch:
    """One request to one target; ``dispatch_by`` is set where it hands KV over.

    A hand-over is always made, even for a client that has left: a Prefiller keeps KV until a Decoder took it.
    """

    target: Target
    request_id: str
    body: bytes
    dispatch_by: float | None = None
    on_late_answer: Callable[[int, bytes], None] | None = None


class Attempts:
    """Makes attempts. Each raises Failure while the client has nothing yet, or returns how it ended."""

    def __init__(
        self,
        upstream: Upstream,
        fleet: Fleet,
        selection: Selection,
        lessons: Lessons,
        suspect: Callable[[Worker], None],
        settings: RouterSettings,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._upstream = upstream
        self._fleet = fleet
        self._selection = selection
        self._lessons = lessons
        self._suspect = suspect
        self._settings = settings
        self._metrics = metrics
        self._budget = RetryBudget(clock)
        self._engine_authorization = _bearer(settings)
        self._releases: set[asyncio.Task[None]] = set()

    async def append(self, call: Call, reply: Reply, target: Target) -> Outcome:
        """Ask a Decoder to reuse what it holds; it may turn the request away."""
        dispatch = _Dispatch(target, new_request_id(), call.body.for_local_attempt())
        return await self._generate(call, reply, dispatch, "append", local=True)

    async def decode(self, call: Call, reply: Reply, target: Target | None = None) -> Outcome:
        """Have one Decoder do everything."""
        target = target or self._selection.decoder(call)
        dispatch = _Dispatch(target, new_request_id(), call.body.raw)
        return await self._generate(call, reply, dispatch, "decode")

    async def prefill_decode(
        self,
        call: Call,
        reply: Reply,
        decision: str,
        target: Target | None = None,
        avoid: Collection[Worker] = (),
    ) -> Outcome:
        """Have a Prefiller compute the prompt's KV, and a Decoder pull it and answer.

        What fails before any output is tried once more where that may help: with other engines, as far as the
        budget for second tries reaches, or with a fresh prefill when the hand-over came too late for the
        Prefiller's lease.
        """
        self._budget.count_request()
        tried = set(avoid)
        try:
            return await self._pass(call, reply, decision, target, tried)
        except TooLate:
            log.warning("a Decoder was not reached in time; the prefill is repeated")
        except Failure as failure:
            if not (failure.may_pass and self._fleet.has_others(tried) and self._budget.take()):
                raise
        self._metrics.retries.inc()
        try:
            return await self._pass(call, reply, decision, None, tried)
        except TooLate:
            message = "The Decoder could not be reached in time after the prefill."
            raise Failure.own(504, message, "handoff_timeout") from None

    async def _pass(
        self, call: Call, reply: Reply, decision: str, target: Target | None, tried: set[Worker]
    ) -> Outcome:
        """Once through a Prefiller and a Decoder, rather not those in ``tried``, to which both are added."""
        self._fleet.require_decoder()
        request_id = new_request_id()
        source = self._selection.prefiller(call, tried)
        tried.add(source.worker)
        parameters = await self._prefill(call, source, request_id)
        dispatch_by = self._now() + self._settings.handoff_timeout_seconds
        chosen = target or self._selection.decoder(call, tried)
        tried.add(chosen.worker)
        dispatch = _Dispatch(chosen, request_id, call.body.for_decoder(parameters), dispatch_by)
        return await self._generate(call, reply, dispatch, decision)

    async def _prefill(self, call: Call, source: Target, request_id: str) -> dict[str, Any]:
        """The transfer parameters for the Decoder. Raises Failure with the Prefiller's own error."""
        release = functools.partial(self._release, call, request_id)
        prefill = _Dispatch(source, request_id, call.body.for_prefiller(), on_late_answer=release)
        request = self._request(call, prefill)
        with self._lessons.serving(call, source, Leg.PREFILL) as service:
            try:
                response = service.answered(await self._upstream.send(request))
                try:
                    body = await read_all(response)
                finally:
                    response.close()
            except UpstreamError as error:
                service.failed()
                raise self._unreachable(source.worker, "Prefiller", error) from error
        if response.status != 200:
            raise Failure(response.status, body, answered(response.headers))
        parameters = _transfer_parameters(body)
        if parameters is None:
            message = "The Prefiller answered without transfer parameters; it does not run as a KV producer."
            raise Failure.own(502, message, "no_transfer_parameters")
        return parameters

    def _release(self, call: Call, request_id: str, status: int, body: bytes) -> None:
        """The Prefiller was done when its client left: a Decoder takes the KV over, or it would be kept to no
        end.
        """
        parameters = _transfer_parameters(body) if status == 200 else None
        if parameters is not None:
            task = asyncio.get_running_loop().create_task(self._take_over(call, request_id, parameters))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _take_over(self, call: Call, request_id: str, parameters: dict[str, Any]) -> None:
        with contextlib.suppress(UpstreamError, Failure):
            target = self._selection.decoder(call)
            dispatch_by = self._now() + self._settings.handoff_timeout_seconds
            body = call.body.for_release(parameters)
            with target.worker.serving(target.rank):
                request = self._request(call, _Dispatch(target, request_id, body, dispatch_by))
                response = await self._upstream.send(request)
                try:
                    await read_all(response)
                finally:
                    response.close()

    async def close(self) -> None:
        for task in self._releases:
            task.cancel()
        await asyncio.gather(*self._releases, return_exceptions=True)

    async def _generate(
        self, call: Call, reply: Reply, dispatch: _Dispatch, decision: str, *, local: bool = False
    ) -> Outcome:
        worker = dispatch.target.worker
        reply.about(decision, dispatch.request_id, dispatch.target.owner)
        with self._lessons.serving(call, dispatch.target, Leg.APPEND if local else Leg.DECODE) as service:
            try:
                response = service.answered(await self._upstream.send(self._request(call, dispatch)))
                try:
                    return await relay(response, reply, local=local)
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
            on_late_answer=dispatch.on_late_answer,
            settle_seconds=0.0 if dispatch.dispatch_by is None else self._settings.handoff_settle_seconds,
        )

    def _headers(self, call: Call, dispatch: _Dispatch) -> list[Header]:
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

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _transfer_parameters(body: bytes) -> dict[str, Any] | None:
    parameters = parsed(body).get("kv_transfer_params")
    return parameters if isinstance(parameters, dict) and parameters else None


def _bearer(settings: RouterSettings) -> bytes | None:
    key = settings.engine_api_key
    return b"Bearer " + key.get_secret_value().encode() if key else None
