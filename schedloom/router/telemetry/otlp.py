"""OpenTelemetry's protocol over HTTP, in its form as JSON (OTLP 1, https://opentelemetry.io/docs/specs/otlp/)."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Any
from urllib.parse import unquote, urlsplit

import orjson

from schedloom import __version__
from schedloom.router.http.upstream import Header

_ERROR = 2


class Kind(IntEnum):
    """What a span is to others."""

    SERVER = 2
    CLIENT = 3


class Span:
    """Something that took time. Times are in nanoseconds of the epoch, ids are hexadecimal; ``parent`` may be empty.
    What is ``None`` in ``about`` is not told.
    """

    def __init__(self, trace_id: str, span_id: str, parent: str, name: str, kind: Kind, begun: int) -> None:
        self.trace_id = trace_id
        self.span_id = span_id
        self.parent = parent
        self.name = name
        self.kind = kind
        self.begun = begun
        self.ended = begun
        self.failed = False
        self.about: dict[str, str | int | float | None] = {}

    def end(self, *, failed: bool) -> None:
        self.ended = time.time_ns()
        self.failed = failed

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "traceId": self.trace_id,
            "spanId": self.span_id,
            "parentSpanId": self.parent,
            "name": self.name,
            "kind": self.kind,
            "startTimeUnixNano": str(self.begun),
            "endTimeUnixNano": str(self.ended),
            "attributes": [_attribute(key, value) for key, value in self.about.items() if value is not None],
            "status": {"code": _ERROR} if self.failed else {},
        }


def written(service: str, spans: Sequence[Span]) -> bytes:
    """What a collector takes."""
    scope = {"scope": {"name": "schedloom", "version": __version__}, "spans": [span.fields for span in spans]}
    resource = {"attributes": [_attribute("service.name", service)]}
    return orjson.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]})


def collector(endpoint: str) -> tuple[str, str, list[Header]]:
    """The origin, the path and the headers by which a collector at ``endpoint`` is reached."""
    parts = urlsplit(endpoint)
    headers = [(b"content-type", b"application/json")]
    if parts.username is not None:
        known = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers.append((b"authorization", b"Basic " + base64.b64encode(known)))
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", path, headers


def _attribute(key: str, value: str | int | float) -> dict[str, Any]:
    if isinstance(value, str):
        return {"key": key, "value": {"stringValue": value}}
    if isinstance(value, int):
        return {"key": key, "value": {"intValue": str(value)}}
    return {"key": key, "value": {"doubleValue": value}}
