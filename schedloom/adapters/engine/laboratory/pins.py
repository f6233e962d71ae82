"""The blocks that a connector holds beside the requests that own them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class PinnedPool:
    """A block pool as a connector sees it, that remembers what the connector has taken and not given back."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.pinned: list[Any] = []

    def touch(self, blocks: Iterable[Any]) -> None:
        held = list(blocks)
        self._pool.touch(held)
        self.pinned.extend(held)

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        returned = list(blocks)
        self._pool.free_blocks(returned)
        for block in returned:
            self.pinned.remove(block)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)
