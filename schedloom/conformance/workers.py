"""Work that is spread over processes, each with an engine of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice, takewhile
from multiprocessing import get_context
from types import TracebackType
from typing import Any, TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


class Workers:
    """``count`` processes, started with the first work for them; one works in this process."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def each(self, work: Callable[[Item], Found], items: Iterable[Item], until: float) -> Iterator[Found]:
        """The results in the order in which they come. Nothing is begun once the monotonic clock reads ``until``."""
        upcoming = iter(items)
        if self._count <= 1:
            yield from map(work, takewhile(lambda item: time.monotonic() < until, upcoming))
            return
        under_way: set[Future[Found]] = set()
        while True:
            room = 2 * self._count - len(under_way) if time.monotonic() < until else 0
            under_way |= {self._submit(work, item) for item in islice(upcoming, room)}
            if not under_way:
                return
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)

    def _submit(self, work: Callable[[Item], Found], item: Any) -> Future[Found]:
        if self._pool is None:
            # Each worker loads an engine of its own; forking one that has threads is not safe.
            os.environ.setdefault("PYTHONHASHSEED", "0")
            self._pool = ProcessPoolExecutor(self._count, mp_context=get_context("spawn"))
        return self._pool.submit(work, item)
