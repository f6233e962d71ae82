"""An engine, as a policy in shadow sees it: nothing comes of anything that it does."""

from __future__ import annotations

from typing import Any

from schedloom.adapters.engine.pool import HashedBlocks


class ShadowPool:
    """A pool view whose blocks stay where they are."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def refresh(self, blocks: HashedBlocks) -> int:
        blocks.forget_reused()
        return len(blocks)


class ShadowView:
    """An engine view with such a pool."""

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    @property
    def pool(self) -> ShadowPool:
        return ShadowPool(self._view.pool)
