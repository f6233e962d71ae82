"""What a client has been told of a stream, and the rest of an answer that an engine tells again from its beginning."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

import orjson

from schedloom.router.sse import data_of, event_of, parsed, split_events

_PACK_BYTES: Final = 16 * 1024
_ONCE: Final = frozenset({"role", "id", "type", "prompt_token_ids", "prompt_text"})
_OF_THE_STREAM: Final = ("id", "created", "model")
_OF_A_CHUNK: Final = ("prompt_token_ids", "prompt_text")
_OF_A_CHOICE: Final = ("text", "token_ids", "prompt_token_ids")

Leaf = tuple[dict[str, Any], str, str]
"""Something told: the object that holds it, its key there, and where in the whole answer it belongs."""


class Differs(Exception):
    """An answer that is told again does not go on where the client was left."""


class Told:
    """The events of one stream, packed when they are many; nothing is parsed while they pass."""

    __slots__ = ("_events", "_packed", "_parts", "_size", "begun", "head", "once")

    def __init__(self) -> None:
        self.begun = False
        self.head: dict[str, Any] = {}
        self.once: set[str] = set()
        self._parts: dict[str, list[Any]] = {}
        self._packed: list[bytes] = []
        self._events: list[bytes] = []
        self._size = 0

    def add(self, events: bytes) -> None:
        self.begun = True
        self._events.append(events)
        self._size += len(events)
        if self._size > _PACK_BYTES:
            self._pack()

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return self._size + sum(map(len, self._packed))

    def _pack(self) -> None:
        self._packed.append(zlib.compress(b"".join(self._events), 1))
        self._events.clear()
        self._size = 0

    async def by_field(self) -> dict[str, Any]:
        """All that was told, as one string or list per field. Raises Differs for what is neither."""
        self._pack()
        while self._packed:
            self._fold(zlib.decompress(self._packed.pop(0)))
            await asyncio.sleep(0)
        return {where: _joined(parts) for where, parts in self._parts.items()}

    def _fold(self, events: bytes) -> None:
        for event in split_events(events):
            data = data_of(event)
            if data is not None:
                self._fold_chunk(parsed(data))

    def _fold_chunk(self, chunk: dict[str, Any]) -> None:
        if not self.head:
            self.head = {key: chunk[key] for key in _OF_THE_STREAM if key in chunk}
        for holder, key, where in _leaves(chunk):
            if key in _ONCE:
                self.once.add(where)
            else:
                self._parts.setdefault(where, []).append(holder[key])


class Retold:
    """Takes out of an answer what ``told`` holds already, and gives the rest the head of the stream so far.

    Raises Differs when the answer does not begin with what was told.
    """

    __slots__ = ("_again", "_head", "_once", "_told")

    def __init__(self, told: Told, by_field: dict[str, Any]) -> None:
        self._told = by_field
        self._once = frozenset(told.once)
        self._head = told.head
        self._again: dict[str, int] = {}

    @classmethod
    async def of(cls, told: Told) -> Retold:
        return cls(told, await told.by_field())

    def rest_of(self, events: bytes) -> bytes:
        return b"".join(map(self._rest_of_event, split_events(events)))

    def _rest_of_event(self, event: bytes) -> bytes:
        data = data_of(event)
        chunk = parsed(data) if data is not None else {}
        if "choices" not in chunk:
            return event
        leaves = list(_leaves(chunk))
        rest = [leaf for leaf in leaves if self._has_rest(*leaf)]
        if _is_finish(chunk):
            self._require_all()
        elif leaves and not rest:
            return b""
        if len(rest) < len(leaves):
            _prune(chunk)
        return event_of(orjson.dumps({**chunk, **self._head}))

    def _has_rest(self, holder: dict[str, Any], key: str, where: str) -> bool:
        """Whether the client lacks anything of a leaf; what it has already is taken out."""
        value = holder[key]
        rest = (None if where in self._once else value) if key in _ONCE else self._beyond(where, value)
        if rest:
            holder[key] = rest
        elif key == "text":
            holder[key] = ""
        else:
            del holder[key]
        return bool(rest)

    def _beyond(self, where: str, value: Any) -> Any:
        told = self._told.get(where, "")
        begin = self._again.get(where, 0)
        if begin >= len(told):
            return value
        if not isinstance(value, type(told)):
            raise Differs(f"{where} is not of the kind that was delivered")
        known = told[begin : begin + len(value)]
        if value[: len(known)] != known:
            raise Differs(f"{where} does not begin with what was delivered")
        self._again[where] = begin + len(value)
        return value[len(known) :]

    def _require_all(self) -> None:
        short = [where for where, told in self._told.items() if self._again.get(where, 0) < len(told)]
        if short:
            raise Differs(f"{short[0]} ends before what was delivered")


def _leaves(chunk: dict[str, Any]) -> Iterator[Leaf]:
    yield from ((chunk, key, key) for key in _OF_A_CHUNK if chunk.get(key))
    for choice in chunk.get("choices") or ():
        yield from ((choice, key, key) for key in _OF_A_CHOICE if choice.get(key))
        delta = choice.get("delta") or {}
        yield from ((delta, key, key) for key in tuple(delta) if delta[key] and key != "tool_calls")
        for call in delta.get("tool_calls") or ():
            yield from _leaves_of_call(call, str(call.get("index", 0)))


def _leaves_of_call(call: dict[str, Any], index: str) -> Iterator[Leaf]:
    for key in tuple(call):
        if call[key] and key not in ("index", "function"):
            yield call, key, f"tool call {index} {key}"
    function = call.get("function") or {}
    for key in tuple(function):
        if function[key]:
            yield function, key, f"tool call {index} function {key}"


def _is_finish(chunk: dict[str, Any]) -> bool:
    return any(choice.get("finish_reason") is not None for choice in chunk["choices"])


def _prune(chunk: dict[str, Any]) -> None:
    """Without tool calls of which nothing is left."""
    for choice in chunk["choices"]:
        delta = choice.get("delta") or {}
        calls = delta.get("tool_calls") or ()
        for call in calls:
            if not call.get("function"):
                call.pop("function", None)
        left = [call for call in calls if call.keys() - {"index"}]
        if left:
            delta["tool_calls"] = left
        else:
            delta.pop("tool_calls", None)


def _joined(parts: list[Any]) -> Any:
    if all(isinstance(part, str) for part in parts):
        return "".join(parts)
    if all(isinstance(part, list) for part in parts):
        return list(chain.from_iterable(parts))
    raise Differs("the answer holds what cannot be put together again")
