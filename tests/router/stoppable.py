"""A fake engine in a process of its own, which can be stopped and told to hold its answers back.

It says its address, ``asked`` for each request that it is to answer, and ``holding`` when it was told to ``hold``.
"""

from __future__ import annotations

import asyncio
import sys

from schedloom.core.wire import Role
from tests.router.fakes import EVENTS, Answer, FakeEngine, Seen, contract
from tests.router.sockets import asgi, served


class HoldingEngine(FakeEngine):
    """While it holds it answers nothing; of streams the head, and with ``begin`` the first events."""

    def __init__(self, role: Role, *, begin: bool) -> None:
        super().__init__("http://engine:1", contract(role))
        self.free = asyncio.Event()
        self.free.set()
        self._begin = begin

    async def answer(self, seen: Seen) -> Answer:
        answer = await super().answer(seen)
        if not seen.raw:
            return answer
        say("asked")
        if answer.kind != EVENTS:
            await self.free.wait()
            return answer
        count = 2 if self._begin else 0
        return Answer(200, EVENTS, [*answer.steps[:count], self.free, *answer.steps[count:]])


def say(word: str) -> None:
    print(word, flush=True)


async def serve(engine: HoldingEngine) -> None:
    async with served(asgi(engine)) as address:
        say(address)
        loop = asyncio.get_running_loop()
        while word := await loop.run_in_executor(None, sys.stdin.readline):
            if word == "hold\n":
                engine.free.clear()
                say("holding")
            else:
                engine.free.set()


if __name__ == "__main__":
    asyncio.run(serve(HoldingEngine(Role(sys.argv[1]), begin="begin" in sys.argv)))
