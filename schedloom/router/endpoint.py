"""The generating endpoints: read and bound a request, serve it, count how it ended."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from schedloom.router.failures import Failure, Shed
from schedloom.router.gate import Gate
from schedloom.router.http.deadlines import Deadlines
from schedloom.router.http.line import LINE, ClientGone, Line, line_of
from schedloom.router.pipeline import Pipeline
from schedloom.router.relay import Outcome
from schedloom.router.reply import Reply
from schedloom.router.requests.bounds import Bounds, OutputBounds
from schedloom.router.requests.call import read_call
from schedloom.router.requests.dialect import DIALECTS
from schedloom.router.requests.headers import ClientHeaders, SessionNames
from schedloom.router.requests.tenants import Tenants
from schedloom.router.telemetry.metrics import Metrics
from schedloom.router.telemetry.traces import Traces
from schedloom.router.watch import Watch

log = logging.getLogger(__name__)


@dataclass
class Door:
    """What every generating endpoint shares."""

    pipeline: Pipeline
    tenants: Tenants
    gate: Gate
    metrics: Metrics
    deadlines: Deadlines
    max_body_bytes: int
    bounds: Bounds
    traces: Traces | None
    session_names: SessionNames | None = None
    draining: bool = False


class Generation:
    """One generating endpoint."""

    def __init__(self, path: str, door: Door) -> None:
        self._path = path
        self._dialect = DIALECTS[path]
        self._door = door
        self._bounds = OutputBounds(path, door.bounds)
        self._began = door.metrics.began
        self._tells = log.isEnabledFor(logging.DEBUG)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        line: Line = scope.get(LINE) or line_of(scope, receive, send)
        reply = Reply(line, self._dialect)
        metrics = self._door.metrics
        reply.on_start = self._began
        metrics.in_flight += 1
        try:
            outcome = await self._serve(scope, receive, line, reply)
        except ClientGone:
            outcome = "served" if reply.succeeded else "client_left"
        except Failure as failure:
            await reply.stop(failure)
            outcome = _outcome_of(failure, reply)
        except asyncio.CancelledError:
            await reply.stop(Failure.own(503, "The router is shutting down.", "shutting_down"))
            raise
        except Exception:
            log.exception("a request ended in an unforeseen error")
            outcome = "failed"
            await reply.stop(Failure.own(500, "The router failed.", "internal_error"))
        finally:
            metrics.in_flight -= 1
        metrics.ended(reply.decision, outcome, reply.pace)
        if reply.trace is not None:
            reply.trace.end(reply, outcome)
        if self._tells:
            self._tell(reply, outcome, time.perf_counter() - reply.came_at)

    def _tell(self, reply: Reply, outcome: str, seconds: float) -> None:
        decoder = "no Decoder" if reply.owner is None else reply.owner.worker
        log.debug(
            "%s: %s with status %d by route %s and %s in %.1f ms, request %s",
            *(self._path, outcome, reply.status, reply.decision or "none", decoder, seconds * 1000),
            reply.request_id or "without an id",
        )

    async def _serve(self, scope: Scope, receive: Receive, line: Line, reply: Reply) -> str:
        door = self._door
        if door.draining:
            raise Failure.own(503, "The router is shutting down.", "shutting_down")
        headers = ClientHeaders(scope["headers"])
        tenant = door.tenants.of(headers.authorization)
        raw = line.arrived(door.max_body_bytes)
        if raw is None:
            raw = await read_body(scope, receive, door.max_body_bytes)
        call = read_call(self._path, headers, raw, tenant, door.session_names, self._bounds)
        if door.traces is not None:
            call.trace = reply.trace = door.traces.begin(self._path, call.model, headers)
        with Watch(line, door.deadlines):
            if not door.gate.enter():
                await door.gate.wait()
            try:
                outcome = await door.pipeline.serve(call, reply)
            finally:
                door.gate.leave()
        return "served" if outcome is Outcome.SERVED else outcome.value


def _outcome_of(failure: Failure, reply: Reply) -> str:
    if reply.succeeded:
        return "served"
    if isinstance(failure, Shed):
        return "shed"
    return "refused" if failure.status < 500 else "failed"


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Raises Failure (413) beyond ``limit`` bytes, before any is received where the headers say so, and ClientGone when
    the rest does not come.
    """
    too_large = Failure.own(413, f"The body must not exceed {limit} bytes.", "body_too_large")
    if any(name == b"content-length" and value.isdigit() and int(value) > limit for name, value in scope["headers"]):
        raise too_large
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise too_large
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)
