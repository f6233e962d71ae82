"""The KV blocks of one rank of one engine, as its events tell of them."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import takewhile
from typing import Any, Final
from weakref import WeakValueDictionary

from schedloom.core.routing import Held

MAX_SESSIONS: Final = 10_000
_NOTHING: Final = bytes(32)
"""What stands for no tokens, as long as any digest."""

_WHOLE = (None, "full_attention", "mla_attention")
"""Kinds of cache in which a block holds all layers' view of its tokens; others are not followed."""


class _Block:
    """``start`` and ``end`` are places in the prompt, in tokens; both ``None`` where its beginning is not known.

    ``content`` stands for all tokens up to ``end``. ``places`` are the kinds of memory that hold the block now.
    """

    __slots__ = ("__weakref__", "content", "end", "parent", "places", "start")

    def __init__(self, parent: _Block | None, start: int | None, size: int, content: bytes) -> None:
        self.parent = parent
        self.start = start
        self.end = None if start is None else start + size
        self.content = content
        self.places: set[str | None] = set()


class Prompt:
    """Token ids, and what stands for their beginnings, worked out once and as far as somebody asks."""

    def __init__(self, token_ids: Sequence[int], cache_salt: str | None = None) -> None:
        self.token_ids = token_ids
        self.cache_salt = cache_salt
        self._tokens = array("q", token_ids)
        self._contents: dict[int, list[bytes]] = defaultdict(list)

    def contents(self, size: int) -> Iterator[bytes]:
        """Of one block of ``size`` tokens, of two, and so on."""
        known = self._contents[size]
        for number in range(len(self._tokens) // size if size else 0):
            if number == len(known):
                known.append(self._content(number, size, known[-1] if known else _NOTHING))
            yield known[number]

    def _content(self, number: int, size: int, before: bytes) -> bytes:
        extra = (self.cache_salt,) if number == 0 and self.cache_salt is not None else None
        return _content(before, self._tokens[number * size : (number + 1) * size], extra)


class BlockLedger:
    """Which blocks are held, by their content and by the sessions that left them.

    ``is_whole`` tells whether every event since the engine's start is known. Blocks that are gone are remembered as
    long as a session's chain runs through them.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self.block_size = 0
        self._held: dict[Any, _Block] = {}
        self._known: WeakValueDictionary[Any, _Block] = WeakValueDictionary()
        self._contents: Counter[bytes] = Counter()
        self._leaves: OrderedDict[str, _Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def apply(self, events: Iterable[Mapping[str, Any]]) -> None:
        for event in events:
            kind = event.get("type")
            if kind == "BlockStored" and event.get("kv_cache_spec_kind") in _WHOLE:
                self._store(event)
            elif kind == "BlockRemoved":
                self._remove(event)
            elif kind == "AllBlocksCleared":
                self.clear(is_whole=True)

    def clear(self, *, is_whole: bool) -> None:
        """Nothing is held, or with ``is_whole`` false nothing is known to be."""
        self._held.clear()
        self._known = WeakValueDictionary()
        self._contents.clear()
        self._leaves.clear()
        self.is_whole = is_whole

    def of_prompt(self, prompt: Prompt) -> Held | None:
        if not self._held and not self.is_whole:
            return None
        held = takewhile(self._contents.__contains__, prompt.contents(self.block_size))
        return Held(sum(1 for _ in held) * self.block_size, self.is_whole)

    def of_session(self, session: str) -> Held | None:
        block = self._leaves.get(session)
        if block is None or block.end is None:
            return Held(0, True) if block is None and self.is_whole else None
        tokens = block.end
        while block is not None:
            if not block.places and block.start is not None:
                tokens = block.start
            block = block.parent
        return Held(tokens, True)

    def _store(self, event: Mapping[str, Any]) -> None:
        size, hashes, tokens = event["block_size"], event["block_hashes"], array("q", event["token_ids"])
        extras = event.get("extra_keys") or [None] * len(hashes)
        self.block_size = size
        parent_hash = event.get("parent_block_hash")
        parent = None if parent_hash is None else self._known.get(parent_hash)
        is_rooted = parent_hash is None
        block = parent
        for number, name in enumerate(hashes):
            extra = tuple(map(_frozen, extras[number])) if extras[number] else None
            block = self._stored(name, block, is_rooted, tokens[number * size : (number + 1) * size], extra, event)
            is_rooted = False
        session = event.get("session_id")
        if session is not None and block is not None:
            self._left(session, block)

    def _stored(
        self,
        name: Any,
        parent: _Block | None,
        is_root: bool,
        tokens: array[int],
        extra: tuple[Any, ...] | None,
        event: Mapping[str, Any],
    ) -> _Block:
        block = self._known.get(name)
        if block is None:
            start = 0 if is_root else parent.end if parent is not None else None
            before = parent.content if parent is not None else _NOTHING
            block = self._known[name] = _Block(parent, start, len(tokens), _content(before, tokens, extra))
        if not block.places and block.start is not None:
            self._contents[block.content] += 1
        block.places.add(event.get("medium"))
        self._held[name] = block
        return block

    def _remove(self, event: Mapping[str, Any]) -> None:
        for name in event["block_hashes"]:
            block = self._held.get(name)
            if block is None:
                continue
            block.places.discard(event.get("medium"))
            if not block.places:
                del self._held[name]
                self._forget_content(block)

    def _forget_content(self, block: _Block) -> None:
        self._contents[block.content] -= 1
        if self._contents[block.content] <= 0:
            del self._contents[block.content]

    def _left(self, session: str, block: _Block) -> None:
        self._leaves[session] = block
        self._leaves.move_to_end(session)
        if len(self._leaves) > MAX_SESSIONS:
            self._leaves.popitem(last=False)


def _content(before: bytes, tokens: array[int], extra: tuple[Any, ...] | None) -> bytes:
    if extra is not None:
        before = sha256(before + repr(extra).encode()).digest()
    return sha256(before + tokens.tobytes()).digest()


def _frozen(key: Any) -> Any:
    return tuple(map(_frozen, key)) if isinstance(key, list) else key
