"""What clients may not say: keys that belong to the router and the engines, wherever they hide."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import orjson

from schedloom.core.wire import RESERVED_PREFIX
from schedloom.router.failures import Failure

EXTRA_ARGUMENTS = "vllm_xargs"
SESSION_KEYS = ("conversation_id", "session_id")
"""Where a body names its session, in this order; engines are told by a header, which a key in the body would
beat.
"""

_TRANSFER_KEYS = frozenset({"kv_transfer_params", "ec_transfer_params"})
_CONSUMED_KEYS = frozenset({*SESSION_KEYS, "request_id"})
_ALONE_KEYS = frozenset({EXTRA_ARGUMENTS})
_NOT_IN_EXTRA_ARGUMENTS = _TRANSFER_KEYS | {"session_id"}
_LONGEST_SHOWN = 64
_GUARDED_KEYS = _TRANSFER_KEYS | _CONSUMED_KEYS | _ALONE_KEYS


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``. Raises Failure (400) for anything else, and where a key is given twice."""
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Failure.own(400, f"The body is not valid JSON: {error}", "invalid_json") from None
    if not isinstance(fields, dict):
        raise Failure.own(400, "The body must be a JSON object.", "invalid_json")
    try:
        if _names_each_key_once(fields, raw):
            return fields
    except orjson.JSONEncodeError:
        raise _too_deep() from None
    _refuse_duplicates(raw)
    return fields


def written(fields: dict[str, Any]) -> bytes:
    """Raises Failure (400) for what was nested too deeply to be written again."""
    try:
        return orjson.dumps(fields)
    except orjson.JSONEncodeError:
        raise _too_deep() from None


def _too_deep() -> Failure:
    return Failure.own(400, "The body is nested too deeply.", "invalid_json")


def holds_nothing_guarded(fields: dict[str, Any]) -> bool:
    """Whether no key of ``fields`` is the router's or the engines', or the session's name."""
    return _GUARDED_KEYS.isdisjoint(fields) and RESERVED_PREFIX not in "\0".join(fields)


def without_guarded_keys(fields: dict[str, Any], raw: bytes) -> tuple[dict[str, Any], bytes]:
    """``fields`` and ``raw`` as they may reach an engine; as they are when nothing is to be removed.

    Raises Failure (400) for ``vllm_xargs`` that is not an object.
    """
    clean = {key: value for key, value in fields.items() if not _is_removed(key)}
    if EXTRA_ARGUMENTS in clean:
        _clean_extra_arguments(clean)
    return (fields, raw) if clean == fields else (clean, written(clean))


def _is_reserved(key: str) -> bool:
    return key.startswith(RESERVED_PREFIX)


def is_guarded(key: str) -> bool:
    return key in _GUARDED_KEYS or key.startswith(RESERVED_PREFIX)


def _is_removed(key: str) -> bool:
    return is_guarded(key) and key not in _ALONE_KEYS


def _clean_extra_arguments(fields: dict[str, Any]) -> None:
    extra = fields[EXTRA_ARGUMENTS]
    if extra is None:
        del fields[EXTRA_ARGUMENTS]
        return
    if not isinstance(extra, dict):
        raise Failure.own(400, "vllm_xargs must be an object.", "invalid_type", EXTRA_ARGUMENTS)
    fields[EXTRA_ARGUMENTS] = {
        key: value for key, value in extra.items() if key not in _NOT_IN_EXTRA_ARGUMENTS and not _is_reserved(key)
    }


def _names_each_key_once(fields: dict[str, Any], raw: bytes) -> bool:
    """Whether a glance shows that ``fields`` hold all that ``raw`` says; true of nearly every body without duplicates.

    What is written again is without the colons of a key, its first value and itself, that was given twice, and has
    those that ``raw`` may have escaped.
    """
    again = orjson.dumps(fields)
    # From the end, because that takes half the time.
    return again == raw or (again.count(b":") == raw.count(b":") and raw.rfind(b"\\u003") < 0)


def _refuse_duplicates(raw: bytes) -> None:
    """A key given twice reads differently to different parsers: one of them could be shown what another
    removed.
    """
    json.loads(raw, object_pairs_hook=_checked, parse_int=len, parse_float=len)


def _checked(pairs: list[tuple[str, Any]]) -> None:
    twice = _first_twice(key for key, _ in pairs)
    if twice is not None:
        shown = twice[:_LONGEST_SHOWN]
        raise Failure.own(400, f"The key {shown!r} is given twice.", "duplicate_key", shown)


def _first_twice(keys: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    return None
