"""Some requests told in full, as spans of OpenTelemetry: the request, and each attempt on an engine within it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from random import Random
from typing import TYPE_CHECKING

from schedloom.core.routing import AttemptReport, Ending
from schedloom.router.http.client import HttpUpstream
from schedloom.router.http.upstream import Timeouts, Upstream, UpstreamError, UpstreamRequest, lines_of
from schedloom.router.requests.headers import TRACE_PARENT_HEADER, ClientHeaders
from schedloom.router.settings import TraceSettings
from schedloom.router.telemetry.otlp import Kind, Span, collector, written

if TYPE_CHECKING:
    from schedloom.router.reply import Reply

log = logging.getLogger(__name__)

_EVERY_SECONDS = 1.0
_LAST_SECONDS = 2.0
_MOST_WAITING = 8192
_MOST_AT_ONCE = 512
_TIMEOUTS = Timeouts(5.0, 5.0)


class Traces:
    """Chooses the requests that are traced, those whose client traces them and a share of those that say nothing, and
    sends their spans to a collector. What it does not take is dropped.
    """

    def __init__(self, settings: TraceSettings, chance: Random | None = None, upstream: Upstream | None = None) -> None:
        self._ratio = settings.ratio
        self._chance = chance or Random()
        self._service = settings.service
        self._collector = collector(settings.endpoint)
        self._upstream = upstream or HttpUpstream()
        self._told: deque[Span] = deque(maxlen=_MOST_WAITING)
        self._sending: asyncio.Task[None] | None = None
        self._fails = False

    def begin(self, path: str, model: str, headers: ClientHeaders) -> Trace | None:
        """``None`` for a request that is not traced."""
        if not headers.tracing:
            if self._chance.random() >= self._ratio:
                return None
            return Trace(self, path, model, self.new_id(16), "")
        parent = _parent(dict(headers.tracing).get(TRACE_PARENT_HEADER, b"").decode("latin-1"))
        return None if parent is None else Trace(self, path, model, *parent)

    def new_id(self, size: int) -> str:
        """Of ``size`` bytes, not all of them zero."""
        return f"{self._chance.getrandbits(8 * size) or 1:0{2 * size}x}"

    def tell(self, span: Span) -> None:
        self._told.append(span)
        if self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._send_soon())

    async def close(self) -> None:
        """Once all that is told was sent, or nobody took it in time."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait({self._sending, asyncio.ensure_future(self._send())}, timeout=_LAST_SECONDS)
        await self._upstream.close()

    async def _send_soon(self) -> None:
        try:
            await asyncio.sleep(_EVERY_SECONDS)
            await self._send()
        finally:
            self._sending = None

    async def _send(self) -> None:
        while self._told:
            spans = [self._told.popleft() for _ in range(min(len(self._told), _MOST_AT_ONCE))]
            try:
                await self._deliver(written(self._service, spans))
                self._fails = False
            except UpstreamError as error:
                self._told.clear()
                self._note(error)

    async def _deliver(self, body: bytes) -> None:
        origin, path, headers = self._collector
        request = UpstreamRequest(origin, "POST", path, (lines_of(headers),), body, _TIMEOUTS)
        response = await self._upstream.send(request)
        try:
            await response.read_all()
        finally:
            response.close()
        if response.status >= 400:
            raise UpstreamError(f"it answers with status {response.status}")

    def _note(self, error: UpstreamError) -> None:
        if not self._fails:
            log.warning("the collector does not take traces, which are dropped: %s", error)
        self._fails = True


class Trace:
    """One request that is traced."""

    def __init__(self, traces: Traces, path: str, model: str, trace_id: str, parent: str) -> None:
        self._traces = traces
        self._span = Span(trace_id, traces.new_id(8), parent, f"POST {path}", Kind.SERVER, time.time_ns())
        self._span.about |= {"http.route": path, "gen_ai.request.model": model}

    def attempt(self, name: str, engine: str, rank: int, request_id: str) -> AttemptTrace:
        own = self._span
        span = Span(own.trace_id, self._traces.new_id(8), own.span_id, name, Kind.CLIENT, time.time_ns())
        span.about |= {"schedloom.engine": engine, "schedloom.rank": rank, "schedloom.request_id": request_id}
        return AttemptTrace(self._traces, span)

    def end(self, reply: Reply, outcome: str) -> None:
        self._span.about |= {
            "schedloom.decision": reply.decision or "none",
            "schedloom.outcome": outcome,
            "schedloom.request_id": reply.request_id or None,
            "http.response.status_code": reply.status or None,
        }
        self._span.end(failed=outcome in ("failed", "broken", "shed"))
        self._traces.tell(self._span)


class AttemptTrace:
    """One attempt on one engine, which is told that its own spans belong to it."""

    def __init__(self, traces: Traces, span: Span) -> None:
        self._traces = traces
        self._span = span

    @property
    def lines(self) -> bytes:
        """The header that tells it."""
        return lines_of([(TRACE_PARENT_HEADER, f"00-{self._span.trace_id}-{self._span.span_id}-01".encode())])

    def end(self, report: AttemptReport, status: int) -> None:
        """``status`` is what the engine answered, if anything."""
        is_refused = report.ending is Ending.LEFT and 400 <= status < 500
        self._span.about |= {
            "schedloom.ending": "refused" if is_refused else report.ending.value,
            "http.response.status_code": status or None,
            "schedloom.first_byte_seconds": report.first_byte,
            "gen_ai.usage.input_tokens": report.prompt_tokens,
            "gen_ai.usage.output_tokens": report.output_tokens,
            "schedloom.cached_tokens": report.cached_tokens,
        }
        self._span.end(failed=report.ending is Ending.FAILED)
        self._traces.tell(self._span)


def _parent(traceparent: str) -> tuple[str, str] | None:
    """The trace and the span of a ``traceparent`` that is recorded (W3C Trace Context, section 3.2), else ``None``."""
    parts = traceparent.split("-")
    if len(parts) < 4 or [len(part) for part in parts[:4]] != [2, 32, 16, 2] or parts[0] == "ff":
        return None
    if any(set(part) - set("0123456789abcdef") for part in parts[:4]) or not int(parts[3], 16) & 1:
        return None
    return (parts[1], parts[2]) if int(parts[1], 16) and int(parts[2], 16) else None
