"""A bound on how long something may take."""

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
            task.cancel()
            await asyncio.wait({task})
