"""Some requests told in full, as spans of OpenTelemetry: the request, and each attempt on an engine within it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING

from schedloom import __version__
from schedloom.core.errors import ConfigurationError
from schedloom.core.routing import AttemptReport, Ending
from schedloom.router.headers import TRACE_PARENT_HEADER, ClientHeaders
from schedloom.router.settings import TraceSettings
from schedloom.router.upstream import lines_of

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

    from schedloom.router.reply import Reply

_Told = str | int | float

_EXPORT_SECONDS = 5.0
_LAST_SECONDS = 2.0


class Traces:
    """Chooses the requests that are traced: those whose client traces them, and a share of those that say nothing.

    Raises ConfigurationError when OpenTelemetry is not installed.
    """

    def __init__(
        self, settings: TraceSettings, chance: Random | None = None, exporter: SpanExporter | None = None
    ) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigurationError(
                f"traces need OpenTelemetry ({error}); run pip install '/path/to/schedloom[traces]' (a checkout)"
            ) from error
        self._ratio = settings.ratio
        self._random = (chance or Random()).random
        self._provider = TracerProvider(resource=Resource.create({"service.name": settings.service}))
        self._exporter = exporter or OTLPSpanExporter(endpoint=settings.endpoint, timeout=_EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("schedloom", __version__)

    def begin(self, path: str, model: str, headers: ClientHeaders) -> Trace | None:
        """``None`` for a request that is not traced."""
        if not headers.tracing:
            sampled = self._random() < self._ratio
        else:
            sampled = _is_sampled(dict(headers.tracing).get(TRACE_PARENT_HEADER, b""))
        return self._trace(path, model, headers) if sampled else None

    def _trace(self, path: str, model: str, headers: ClientHeaders) -> Trace:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.tracing}
        parent = TraceContextTextMapPropagator().extract(carrier)
        about = {"http.route": path, "gen_ai.request.model": model}
        return Trace(self, self._tracer.start_span(f"POST {path}", parent, SpanKind.SERVER, about))

    def attempt(self, name: str, within: Context, about: Mapping[str, str | int]) -> Span:
        from opentelemetry.trace import SpanKind

        return self._tracer.start_span(name, within, SpanKind.CLIENT, about)

    async def close(self) -> None:
        """Once all that is told was sent, or nobody took it in time."""
        await asyncio.to_thread(self._send_the_rest)

    def _send_the_rest(self) -> None:
        enough = threading.Timer(_LAST_SECONDS, self._exporter.shutdown)
        enough.start()
        self._provider.shutdown()
        enough.cancel()


class Trace:
    """One request that is traced."""

    def __init__(self, traces: Traces, span: Span) -> None:
        from opentelemetry.trace import set_span_in_context

        self._traces = traces
        self._span = span
        self._context = set_span_in_context(span)

    def attempt(self, name: str, engine: str, rank: int, request_id: str) -> AttemptTrace:
        about: dict[str, str | int] = {
            "schedloom.engine": engine,
            "schedloom.rank": rank,
            "schedloom.request_id": request_id,
        }
        return AttemptTrace(self._traces.attempt(name, self._context, about))

    def end(self, reply: Reply, outcome: str) -> None:
        from opentelemetry.trace import StatusCode

        told = {
            "schedloom.decision": reply.decision or "none",
            "schedloom.outcome": outcome,
            "schedloom.request_id": reply.request_id or None,
            "http.response.status_code": reply.status or None,
        }
        self._span.set_attributes(_without_gaps(told))
        if outcome in ("failed", "broken"):
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class AttemptTrace:
    """One attempt on one engine, which is told that its own spans belong to it."""

    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def lines(self) -> bytes:
        """The header that tells it."""
        known = self._span.get_span_context()
        return lines_of([(TRACE_PARENT_HEADER, b"00-%032x-%016x-01" % (known.trace_id, known.span_id))])

    def end(self, report: AttemptReport, status: int) -> None:
        """``status`` is what the engine answered, if anything."""
        from opentelemetry.trace import StatusCode

        is_refused = report.ending is Ending.LEFT and 400 <= status < 500
        told = {
            "schedloom.ending": "refused" if is_refused else report.ending.value,
            "http.response.status_code": status or None,
            "schedloom.first_byte_seconds": report.first_byte,
            "gen_ai.usage.input_tokens": report.prompt_tokens,
            "gen_ai.usage.output_tokens": report.output_tokens,
            "schedloom.cached_tokens": report.cached_tokens,
        }
        self._span.set_attributes(_without_gaps(told))
        if report.ending is Ending.FAILED:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


def _without_gaps(told: Mapping[str, _Told | None]) -> dict[str, _Told]:
    return {name: value for name, value in told.items() if value is not None}


def _is_sampled(parent: bytes) -> bool:
    """Whether a ``traceparent`` says that its trace is recorded (W3C Trace Context, section 3.2)."""
    parts = parent.split(b"-")
    try:
        return len(parts) >= 4 and bool(int(parts[3], 16) & 1)
    except ValueError:
        return False
