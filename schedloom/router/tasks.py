"""Tasks: how long one may take, and the end of those that nobody needs any more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_Answer = TypeVar("_Answer")


async def within(seconds: float, work: Coroutine[Any, Any, _Answer]) -> _Answer:
    """What ``work`` returns. Raises asyncio.TimeoutError when it takes longer.

    asyncio.wait_for, before Python 3.12, forgets that it was cancelled when ``work`` ends in the same instant.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        if not task.done():
            await stopped(task)


async def stopped(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel ``tasks``, as many as there are, and wait until they have let go of everything."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
