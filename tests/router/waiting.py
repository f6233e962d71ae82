"""Waiting for what is to come. How long that takes says how busy the machine is, and nothing about the router."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec

PATIENCE_SECONDS = 60.0
"""What has not come by then does not come. Counted in looks, since a machine may stop a process for a minute."""

_LOOK_SECONDS = 0.01

_Arguments = ParamSpec("_Arguments")
_Attempt = Callable[_Arguments, Awaitable[None]]


async def until(condition: Callable[[], object]) -> None:
    for _ in range(int(PATIENCE_SECONDS / _LOOK_SECONDS)):
        if condition():
            return
        await asyncio.sleep(_LOOK_SECONDS)
    raise AssertionError("it did not come to that")


def in_one_of(
    tries: int,
) -> Callable[[_Attempt[_Arguments]], Callable[_Arguments, Coroutine[Any, Any, None]]]:
    """A test about time passes when one of its tries does: where the machine is held up, what is right may be late,
    and what is wrong is late every time.
    """

    def decorate(attempt: _Attempt[_Arguments]) -> Callable[_Arguments, Coroutine[Any, Any, None]]:
        @functools.wraps(attempt)
        async def test(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> None:
            for _ in range(tries - 1):
                try:
                    return await attempt(*arguments, **keywords)
                except Exception:
                    continue
            await attempt(*arguments, **keywords)

        return test

    return decorate
