"""Server-sent events: complete ones out of any chunking, and what is in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson

DONE = b"[DONE]"

_BETWEEN_EVENTS = re.compile(rb"(?<=\n)\r?\n")


class EventFramer:
    """Collects chunks and gives back whole events, so that half of one never travels on."""

    __slots__ = ("rest",)

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, chunk: bytes) -> bytes:
        """All events that are complete by now, each with the empty line that ends it."""
        data = self.rest + chunk if self.rest else chunk
        if data.endswith(b"\n\n"):
            self.rest = b""
            return data
        end = max(data.rfind(b"\n\n") + 1, data.rfind(b"\n\r\n") + 2)
        if end < 2:
            self.rest = data
            return b""
        self.rest = data[end + 1 :]
        return data[: end + 1]


def split_events(events: bytes) -> Iterator[bytes]:
    """The single events of what ``EventFramer.feed`` returned, each with its ending."""
    begin = 0
    for boundary in _BETWEEN_EVENTS.finditer(events):
        yield events[begin : boundary.end()]
        begin = boundary.end()


def data_of(event: bytes) -> bytes | None:
    """The data of one event; ``None`` for comments and events without any."""
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def parsed(data: bytes) -> dict[str, Any]:
    """The JSON object in an event's data; empty when there is none."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def event_of(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


def is_end(events: bytes) -> bool:
    """Whether the last of ``events`` is the end mark."""
    return events[-24:].rstrip().endswith((b"data: [DONE]", b"data:[DONE]"))


def tells_an_error(events: bytes) -> bool:
    """Whether an engine tells an error in the middle of its stream.

    Within a JSON string the quotes would be escaped, so that a model's own words are never taken for one.
    """
    find = events.find
    return find(b'data: {"error"') >= 0 or find(b'data:{"error"') >= 0 or find(b"event: error\n") >= 0
