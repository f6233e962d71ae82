"""Who owns a session: the Decoder that served its last successful turn."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from schedloom.core.routing import SessionOwner


class SessionKey(NamedTuple):
    """A session belongs to one tenant and one model; ids are equal only when they are equal to the letter."""

    tenant: str
    model: str
    session: str

    def digest(self) -> bytes:
        """16 bytes, the same for equal keys alone, however long they are."""
        tenant, model, session = (word.encode("utf-8", "surrogatepass") for word in self)
        lengths = b"%d %d " % (len(tenant), len(model))
        return hashlib.blake2b(lengths + tenant + model + session, digest_size=16).digest()


class SessionStore(Protocol):
    """Where ownership is kept."""

    async def owner(self, key: SessionKey) -> SessionOwner | None: ...
    async def bind(self, key: SessionKey, owner: SessionOwner) -> None: ...
    async def close(self) -> None: ...


@runtime_checkable
class SessionsAtHand(SessionStore, Protocol):
    """Ownership that is known at once."""

    def find(self, key: SessionKey) -> SessionOwner | None:
        """``owner``, at once."""
        ...

    def keep(self, key: SessionKey, owner: SessionOwner) -> None:
        """``bind``, at once."""
        ...


class MemorySessions:
    """Ownership in this process.

    Holds at most ``capacity`` sessions, the least recently used go first; a session that was idle for longer
    than ``idle_seconds`` of ``clock`` is forgotten.
    """

    def __init__(self, capacity: int, idle_seconds: float, clock: Callable[[], float]) -> None:
        self._capacity = capacity
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._entries: OrderedDict[SessionKey, tuple[SessionOwner, float]] = OrderedDict()
        self._none_idle_before = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    async def owner(self, key: SessionKey) -> SessionOwner | None:
        return self.find(key)

    async def bind(self, key: SessionKey, owner: SessionOwner) -> None:
        self.keep(key, owner)

    def find(self, key: SessionKey) -> SessionOwner | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        owner, used = entry
        if self._clock() - used > self._idle_seconds:
            del self._entries[key]
            return None
        self._touch(key, owner)
        return owner

    def keep(self, key: SessionKey, owner: SessionOwner) -> None:
        now = self._touch(key, owner)
        if now >= self._none_idle_before:
            self._drop_idle(now)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    async def close(self) -> None:
        return None

    def _touch(self, key: SessionKey, owner: SessionOwner) -> float:
        now = self._clock()
        self._entries[key] = (owner, now)
        self._entries.move_to_end(key)
        return now

    def _drop_idle(self, now: float) -> None:
        """The oldest stand first, so that each call pays only for what it drops. When the next may be idle is kept:
        nothing of the oldest is in the processor's caches.
        """
        while self._entries:
            _, used = next(iter(self._entries.values()))
            self._none_idle_before = used + self._idle_seconds
            if self._none_idle_before >= now:
                return
            self._entries.popitem(last=False)
