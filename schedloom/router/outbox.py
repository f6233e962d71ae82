"""Writes to many connections, made together."""

from __future__ import annotations

import asyncio
import functools

_MOST_BYTES = 256 * 1024


class Outbox:
    """Holds back what is written until the event loop has come round, and then writes it all, once to each connection.

    A write wakes whoever waits for it, which costs more than the write itself: of several made one after the other,
    most find their reader awake. Whoever writes more than a round's worth at once is not held back, so that
    connections notice what they cannot take.
    """

    def __init__(self) -> None:
        self._held: dict[asyncio.WriteTransport, tuple[bytes, ...]] = {}
        self._bytes = 0

    def put(self, transport: asyncio.WriteTransport, *parts: bytes) -> None:
        """Write ``parts``, of which the last is the largest."""
        held = self._held
        if transport in held:
            held[transport] += parts
        else:
            if not held:
                self._loop.call_soon(self.empty)
            held[transport] = parts
        self._bytes += len(parts[-1])
        if self._bytes > _MOST_BYTES:
            self.empty()

    def empty(self) -> None:
        """Write what is held, but to connections that are closed by now."""
        held, self._held = self._held, {}
        self._bytes = 0
        for transport, parts in held.items():
            if not transport.is_closing():
                transport.writelines(parts)

    @functools.cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()
