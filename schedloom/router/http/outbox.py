"""Writes to many connections, made together."""

from __future__ import annotations

import asyncio
import functools

_MOST_BYTES = 256 * 1024


class Outbox:
    """Holds back what is written until the event loop has come round, and then writes it all, once to each connection.

    A write wakes whoever waits for it, which costs more than the write itself: of several made one after the other,
    most find their reader awake. Nothing is held back where it would not be one of several: the first write after a
    round with one only, and what is more than ``_MOST_BYTES``, so that connections notice what they cannot take.
    """

    def __init__(self) -> None:
        self._held: dict[asyncio.WriteTransport, bytes | tuple[bytes, ...]] = {}
        self._bytes = 0
        self._writes = 0
        self._is_crowded = False

    def put(self, transport: asyncio.WriteTransport, data: bytes, body: bytes = b"") -> None:
        """Write ``data``, and ``body`` behind it, which may be large: the two are not joined."""
        self._writes += 1
        if self._writes == 1:
            self._loop.call_soon(self._come_round)
            if not self._is_crowded:
                return transport.writelines((data, body)) if body else transport.write(data)
        held = self._held
        added = (data, body) if body else data
        held[transport] = (*_parts(held[transport]), *_parts(added)) if transport in held else added
        self._bytes += len(data) + len(body)
        if self._bytes > _MOST_BYTES:
            self.empty()
        return None

    def empty(self) -> None:
        """Write what is held, but to connections that are closed by now."""
        held, self._held = self._held, {}
        self._bytes = 0
        for transport, data in held.items():
            if transport.is_closing():
                continue
            if isinstance(data, bytes):
                transport.write(data)
            else:
                transport.writelines(data)

    def _come_round(self) -> None:
        self._is_crowded = self._writes > 1
        self._writes = 0
        self.empty()

    @functools.cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()


class Nowhere(Outbox):
    """Takes what is written for those who have left."""

    def put(self, transport: asyncio.WriteTransport, data: bytes, body: bytes = b"") -> None:
        pass


def _parts(data: bytes | tuple[bytes, ...]) -> tuple[bytes, ...]:
    return (data,) if isinstance(data, bytes) else data
