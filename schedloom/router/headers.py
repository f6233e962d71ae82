"""Which headers travel, in both directions. Both tables are allow-lists."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from urllib.parse import quote

from schedloom.router.failures import Failure
from schedloom.router.upstream import Header

SESSION_HEADER = b"x-session-id"
RANK_HEADER = b"x-data-parallel-rank"
REQUEST_ID_HEADER = b"x-request-id"
DECISION_HEADER = b"x-schedloom-decision"
DECODER_HEADER = b"x-schedloom-decoder"
HINT_PREFIX = b"x-schedloom-"

MAX_SESSION_CHARACTERS = 256
_MAX_HINT_CHARACTERS = 64
_NO_HINTS: Mapping[str, str] = MappingProxyType({})

_TRACING = frozenset({b"traceparent", b"tracestate"})
_ANSWERED = frozenset({b"content-type", b"retry-after"})
_VISIBLE = "".join(map(chr, range(0x21, 0x7F))).replace("%", "")
_PLAIN = re.compile(r"[\w.:/-]+", re.ASCII).fullmatch
_NOT_FOR_LOGS = re.compile(r"[^\x21-\x7e]+")


class ClientHeaders:
    """What the router reads from a client's headers; everything else is dropped.

    ``hints`` are for routing policies: what begins with ``x-schedloom-``, by the rest of the name.
    """

    __slots__ = ("authorization", "hints", "request_id", "session", "tracing")

    def __init__(self, headers: Iterable[Header]) -> None:
        self.authorization: bytes | None = None
        self.session: str | None = None
        self.request_id = ""
        self.tracing: list[Header] = []
        self.hints = _NO_HINTS
        for name, value in headers:
            if name == SESSION_HEADER:
                self.session = value.decode("latin-1").strip() or None
            elif name == b"authorization":
                self.authorization = value
            elif name == REQUEST_ID_HEADER:
                self.request_id = _NOT_FOR_LOGS.sub("?", value.decode("latin-1"))[:128]
            elif name in _TRACING:
                self.tracing.append((name, value))
            elif name.startswith(HINT_PREFIX):
                hint = value.decode("latin-1").strip()[:_MAX_HINT_CHARACTERS]
                self.hints = {**self.hints, name[len(HINT_PREFIX) :].decode("latin-1"): hint}


def session_of(headers: ClientHeaders, conversation: str | None) -> str | None:
    """The client's session key: the header wins over the body. Raises Failure (400) for a long one."""
    session = headers.session or conversation
    if session is not None and len(session) > MAX_SESSION_CHARACTERS:
        message = f"A session id must not be longer than {MAX_SESSION_CHARACTERS} characters."
        raise Failure.own(400, message, "session_id_too_long")
    return session


def session_value(session: str) -> bytes:
    """A session key as a header's value: visible ASCII as it is, the rest (and the percent sign) escaped."""
    if _PLAIN(session):
        return session.encode("ascii")
    return quote(session, safe=_VISIBLE).encode("ascii")


def answered(headers: Sequence[Header]) -> list[Header]:
    """The headers of an engine's answer that a client may see."""
    return [(name, value) for name, value in headers if name in _ANSWERED]
