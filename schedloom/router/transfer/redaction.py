"""Transfer parameters taken out of what clients are told: engines' addresses are no business of theirs."""

from __future__ import annotations

from typing import Any

import orjson

from schedloom.router.sse import data_of, event_of, parsed, split_events

TRANSFER_KEY = b'_transfer_params"'
"""How the keys end under which engines tell of transfers, of KV and of what encoders made."""

_NO_TRANSFER = TRANSFER_KEY + b":null"
_KEYS = ("kv_transfer_params", "ec_transfer_params")
_HOLDER = "response"


def redacted_events(events: bytes) -> bytes:
    """Whole events of a stream without them, and otherwise as they are."""
    return events if _holds_none(events) else b"".join(map(_redacted_event, split_events(events)))


def redacted_answer(body: bytes) -> bytes:
    """A complete JSON answer without them; ``body`` itself where there are none."""
    if _holds_none(body):
        return body
    fields = parsed(body)
    clean = _redacted(fields)
    return body if clean is fields else orjson.dumps(clean)


def _holds_none(answer: bytes) -> bool:
    """Whether a glance shows that ``answer`` carries none, as most show that name them ``null``."""
    named = answer.count(TRANSFER_KEY)
    return named == 0 or named == answer.count(_NO_TRANSFER)


def _redacted_event(event: bytes) -> bytes:
    data = data_of(event) if TRANSFER_KEY in event else None
    fields = parsed(data) if data else {}
    clean = _redacted(fields)
    if clean is fields:
        return event
    others = (line for line in event.splitlines(keepends=True) if line.strip() and not line.startswith(b"data:"))
    return b"".join(others) + event_of(orjson.dumps(clean))


def _redacted(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer, or what holds one, without them; ``answer`` itself where there are none."""
    changed: dict[str, Any] = {key: None for key in _KEYS if answer.get(key) is not None}
    held = answer.get(_HOLDER)
    if isinstance(held, dict) and (clean := _redacted(held)) is not held:
        changed[_HOLDER] = clean
    return {**answer, **changed} if changed else answer
