"""Which headers travel, in both directions. Both tables are allow-lists."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from urllib.parse import quote

from schedloom.router.failures import Failure
from schedloom.router.http.upstream import Header, lines_of

SESSION_HEADER = b"x-session-id"
RANK_HEADER = b"x-data-parallel-rank"
REQUEST_ID_HEADER = b"x-request-id"
DECISION_HEADER = b"x-schedloom-decision"
DECODER_HEADER = b"x-schedloom-decoder"
TRACE_PARENT_HEADER = b"traceparent"
API_KEY_HEADER = b"x-api-key"
HINT_PREFIX = b"x-schedloom-"

MAX_SESSION_CHARACTERS = 256
_MAX_HINT_CHARACTERS = 64

Fields = Mapping[str, object]

_NOTHING: Fields = MappingProxyType({})
_NO_HINTS: Mapping[str, str] = MappingProxyType({})
_TRACING = frozenset({TRACE_PARENT_HEADER, b"tracestate"})
_ANSWERED = frozenset({b"content-type", b"retry-after"})
_VISIBLE = "".join(map(chr, range(0x21, 0x7F))).replace("%", "")
_VISIBLE_BYTES = _VISIBLE.encode("ascii")


class ClientHeaders:
    """What the router reads from a client's headers; everything else is dropped.

    ``authorization`` is made of a key in Anthropic's header where there is none. ``hints`` are for routing policies:
    what begins with ``x-schedloom-``, by the rest of the name.
    """

    __slots__ = ("_given", "authorization", "session", "tracing")

    def __init__(self, headers: Sequence[Header]) -> None:
        self._given = given = dict(headers)
        self.authorization = given.get(b"authorization")
        if self.authorization is None and API_KEY_HEADER in given:
            self.authorization = b"Bearer " + given[API_KEY_HEADER]
        self.session = given[SESSION_HEADER].decode("latin-1").strip() or None if SESSION_HEADER in given else None
        self.tracing = [] if _TRACING.isdisjoint(given) else [header for header in headers if header[0] in _TRACING]

    def named(self, name: str) -> str | None:
        """The header ``name``, if it says anything."""
        return self._given.get(name.lower().encode(), b"").decode("latin-1").strip() or None

    @property
    def trace_state(self) -> list[Header]:
        """What of ``tracing`` holds for every span of a trace."""
        return [header for header in self.tracing if header[0] != TRACE_PARENT_HEADER]

    @property
    def hints(self) -> Mapping[str, str]:
        if not b" ".join(self._given).count(HINT_PREFIX):
            return _NO_HINTS
        return {
            name[len(HINT_PREFIX) :].decode("latin-1"): value.decode("latin-1").strip()[:_MAX_HINT_CHARACTERS]
            for name, value in self._given.items()
            if name.startswith(HINT_PREFIX)
        }


class SessionNames:
    """Further places where a client may name its session: headers, and, beginning with ``$.``, paths in its body."""

    def __init__(self, places: Sequence[str]) -> None:
        self._places = [place.removeprefix("$.").split(".") if place.startswith("$.") else place for place in places]

    def first(self, headers: ClientHeaders, fields: Fields) -> str | None:
        for place in self._places:
            named = headers.named(place) if isinstance(place, str) else _string_at(place, fields)
            if named:
                return named
        return None


def _string_at(path: Sequence[str], value: object) -> str | None:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


def session_of(
    headers: ClientHeaders, conversation: str | None, names: SessionNames | None = None, fields: Fields = _NOTHING
) -> str | None:
    """The client's session key: the header wins over the body, and both over further ``names``, of which the first
    that is there counts. Raises Failure (400) for a long one.
    """
    session = headers.session or conversation
    if session is None and names is not None:
        session = names.first(headers, fields)
    if session is not None and len(session) > MAX_SESSION_CHARACTERS:
        message = f"A session id must not be longer than {MAX_SESSION_CHARACTERS} characters."
        raise Failure.own(400, message, "session_id_too_long")
    return session


def session_value(session: str) -> bytes:
    """A session key as a header's value: visible ASCII as it is, the rest (and the percent sign) escaped."""
    value = session.encode()
    return quote(value, safe=_VISIBLE).encode("ascii") if value.translate(None, _VISIBLE_BYTES) else value


def answered(headers: Sequence[Header]) -> list[Header]:
    """The headers of an engine's answer that a client may see."""
    return [header for header in headers if header[0] in _ANSWERED]


def answered_lines(headers: Sequence[Header]) -> bytes:
    """The same, as they are sent."""
    lines = b""
    for name, value in headers:
        if name in _ANSWERED:
            lines += b"%b: %b\r\n" % (name, value)
    return lines


@functools.lru_cache(maxsize=1024)
def lines_about(decision: str, decoder: str) -> bytes:
    """How an answer came about, up to the request's id, which follows. What is empty is not there."""
    about = [(DECISION_HEADER, decision.encode()), (DECODER_HEADER, decoder.encode())]
    return lines_of(line for line in about if line[1]) + REQUEST_ID_HEADER + b": "
