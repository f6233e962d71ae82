"""How each API ends its streams and tells its errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from schedloom.router.sse import event_of, is_end


@dataclass(frozen=True, slots=True)
class Dialect:
    """``ends`` tells whether events hold the end of a complete stream. ``error`` is the event that ends a stream in an
    error, ``failure`` the body of an error in place of an answer, both made from an error body in OpenAI's shape.
    ``split`` tells whether a request can be served by a Prefiller and a Decoder, ``turn`` whether it is a turn of a
    session at all.
    """

    ends: Callable[[bytes], bool]
    error: Callable[[bytes], bytes]
    failure: Callable[[bytes], bytes] = bytes
    split: bool = False
    turn: bool = True


def _responses_end(events: bytes) -> bool:
    return b"event: response.completed\n" in events or b"event: response.incomplete\n" in events


def _responses_error(body: bytes) -> bytes:
    error = _error_in(body)
    return _named("error", {"type": "error", **{key: error[key] for key in ("code", "message", "param")}})


def _messages_end(events: bytes) -> bool:
    return b"event: message_stop\n" in events


def _messages_error(body: bytes) -> bytes:
    return b"event: error\n%b" % event_of(_messages_failure(body))


def _messages_failure(body: bytes) -> bytes:
    error = _error_in(body)
    kind = _MESSAGES_TYPES.get(error["type"], error["type"])
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": error["message"]}})


def _error_in(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = orjson.loads(body)["error"]
    return error


def _named(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\n%b" % (name.encode(), event_of(orjson.dumps(fields)))


_MESSAGES_TYPES = {"server_error": "api_error"}

COMPLETIONS = Dialect(is_end, event_of, split=True)
_TOKENS = Dialect(is_end, event_of, turn=False)

DIALECTS = {
    "/v1/chat/completions": COMPLETIONS,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": Dialect(_responses_end, _responses_error),
    "/v1/messages": Dialect(_messages_end, _messages_error, _messages_failure),
    "/v1/messages/count_tokens": Dialect(_messages_end, _messages_error, _messages_failure, turn=False),
    "/tokenize": _TOKENS,
    "/detokenize": _TOKENS,
}
"""The endpoints that take a body, as far as the engines serve them."""
