"""A prefill for which two wait: a client, who may go elsewhere, and a Decoder, which may not."""

from __future__ import annotations

import asyncio
from typing import Any

from schedloom.router.dispatch import timed_out
from schedloom.router.failures import Failure
from schedloom.router.fleet.worker import Worker


class Wait:
    """A client's. It ends when the prefill is given up, which goes on all the same for the Decoder."""

    def __init__(self) -> None:
        self._end: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()

    def end(self, prefiller: Worker) -> bool:
        """Returns that the prefill is not to end."""
        if not self._end.done():
            self._end.set_result(timed_out("Prefiller", prefiller))
        return False

    async def failure(self, prefill: asyncio.Task[None], decode: asyncio.Task[Any]) -> BaseException | None:
        """Why there will be nothing to decode, if that shows before ``decode`` is done."""
        either: set[asyncio.Future[Any]] = {prefill, decode, self._end}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if decode.done():
            return None
        return prefill.exception() if prefill.done() else self._end.result()
