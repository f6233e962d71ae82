"""What goes on after its request has ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from schedloom.router.failures import Failure
from schedloom.router.http.upstream import UpstreamError
from schedloom.router.tasks import stopped

Result = TypeVar("Result")


class Background:
    """Work that engines wait for is finished even for a client that has left."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        self.keep(_quietly(work))

    def keep(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Work that goes on whether or not somebody waits for how it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    async def close(self) -> None:
        await stopped(*self._tasks)


async def _quietly(work: Coroutine[Any, Any, Any]) -> None:
    with contextlib.suppress(UpstreamError, Failure):
        await work
