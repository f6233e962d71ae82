"""Want of memory, where a policy lets so few requests run at once that a small pool is enough for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Squeeze:
    """Takes all free blocks while two requests run and ``is_wanted`` says so, and gives them back once one of them was
    preempted."""

    def __init__(self, scheduler: Any, is_wanted: Callable[[], bool]) -> None:
        self._scheduler = scheduler
        self._is_wanted = is_wanted
        self._taken: list[Any] = []
        self._running: list[Any] = []

    def look(self) -> None:
        """To be called before each step."""
        decoding = [request for request in self._scheduler.running if request.num_output_tokens]
        if self._taken:
            if len(decoding) < len(self._running):
                self.relax()
        elif len(decoding) > 1 and self._is_wanted():
            pool = self._scheduler.kv_cache_manager.block_pool
            self._taken = pool.get_new_blocks(pool.get_num_free_blocks())
            self._running = decoding

    def relax(self) -> None:
        self._scheduler.kv_cache_manager.block_pool.free_blocks(self._taken)
        self._taken = []
