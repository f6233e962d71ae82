"""X8: a bound on time that loses neither the answer nor a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from schedloom.router.tasks import within

pytestmark = pytest.mark.anyio


async def answer(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "answer"


async def test_an_answer_in_time_is_returned_and_an_error_raised() -> None:
    assert await within(60, answer(0)) == "answer"

    async def fail() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await within(60, fail())


async def test_what_takes_too_long_is_ended() -> None:
    ended = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(asyncio.TimeoutError):
        await within(0.01, hang())
    assert ended.is_set()


async def test_a_cancellation_in_the_instant_of_the_answer_is_not_lost() -> None:
    answered = asyncio.get_running_loop().create_future()

    async def ask() -> None:
        await answered

    task = asyncio.create_task(within(60, ask()))
    await asyncio.sleep(0.01)
    answered.set_result(None)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
