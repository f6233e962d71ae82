"""Another data-parallel rank on the same host, of which nothing is there but what it tells of its load."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schedloom.adapters.engine.peers import LoadBoard


class Ranks:
    """The board that a scheduler reads, where its policies read one, and the other rank's end of it."""

    def __init__(self, scheduler: Any, clock: Callable[[], float]) -> None:
        self._other: LoadBoard | None = None
        if not any(policy.reads_peers for policy in scheduler.policies.policies):
            return
        self._folder = tempfile.TemporaryDirectory(prefix="schedloom-ranks-")
        path = Path(self._folder.name) / "load"
        self._max_running = scheduler.max_num_active_reqs
        self._other = LoadBoard(path, 1, clock)
        self._own = scheduler.view.board = LoadBoard(path, 0, clock)

    def tell(self, running: int, kv_usage: float) -> None:
        if self._other is not None:
            self._other.publish(running, 0, self._max_running, kv_usage)

    def close(self) -> None:
        if self._other is not None:
            self._other.close()
            self._own.close()
            self._folder.cleanup()
