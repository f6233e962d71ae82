"""B1, B13, R12: as long as one Prefiller and one Decoder are well, requests are served, by every way of moving KV.

Two Prefillers and two Decoders on a simulated clock, ten requests a second: first turns, follow-up turns that their
Decoder answers or turns away, and requests that cannot be split. From some moment on one engine is in trouble, or one
of each role at the same time.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from schedloom.core.wire import CONTRACT_PATH, KvEndpoint, Role
from schedloom.router.app import RouterApp
from schedloom.router.http.upstream import ConnectFailed, TimedOut
from schedloom.router.laboratory.client import Client
from schedloom.router.laboratory.clock import simulate
from tests.router.conftest import settings_for
from tests.router.fakes import BROKEN, EVENTS, JSON, Answer, FakeEngine, FakeUpstream, Seen, contract

REQUESTS, SERVED = 1_000, 999
WARM_UP = 100
REQUESTS_PER_SECOND = 10
ERROR = {"error": {"message": "no", "code": 500}}
CONNECTORS = {"pull": "NixlConnector", "push": "NixlPushConnector", "layerwise": "MooncakeLayerwiseConnector"}

Trouble = Callable[[Seen, float], Awaitable[Answer | None]]
"""What an engine answers instead, so many seconds after its trouble began."""


def kind_of(seen: Seen) -> bytes:
    return EVENTS if seen.body.get("stream") else JSON


async def refused(seen: Seen, now: float) -> Answer:
    return Answer(200, JSON, [ConnectFailed("refused")])


async def failing(seen: Seen, now: float) -> Answer:
    return Answer.error(500)


async def failing_late(seen: Seen, now: float) -> Answer:
    """A stream begins with a fine status, and then tells the error."""
    return Answer.stream(ERROR, "[DONE]") if seen.body.get("stream") else Answer.error(500)


async def cut(seen: Seen, now: float) -> Answer:
    return Answer(200, kind_of(seen), [BROKEN])


async def full(seen: Seen, now: float) -> Answer:
    return Answer.error(503)


async def hanging(seen: Seen, now: float) -> Answer:
    await asyncio.sleep(5)
    return Answer(200, JSON, [TimedOut("silent")])


async def slow(seen: Seen, now: float) -> None:
    await asyncio.sleep(4)


def flapping(trouble: Trouble, seconds: float) -> Trouble:
    async def answer(seen: Seen, now: float) -> Answer | None:
        return await trouble(seen, now) if now // seconds % 2 == 0 else None

    answer.__name__ = f"{trouble.__name__} for {seconds:g} s of {2 * seconds:g}"
    return answer


@dataclass(eq=False)
class Engine(FakeEngine):
    """One that waits for the KV that it is told of, where that is written to it."""

    mode: str = "pull"
    trouble: Trouble | None = None
    town: Any = None

    async def answer(self, seen: Seen) -> Answer:
        if self.trouble is not None and (seen.path != CONTRACT_PATH or self.trouble is refused):
            now = asyncio.get_running_loop().time() - self.town.began
            if (instead := await self.trouble(seen, now)) is not None:
                self.seen.append(seen)
                return instead
        return await super().answer(seen) if seen.path == CONTRACT_PATH else await self._served(seen)

    async def _served(self, seen: Seen) -> Answer:
        await asyncio.sleep(0.05)
        parameters = seen.body.get("kv_transfer_params") or {}
        if parameters.get("do_remote_prefill") and self.mode != "pull":
            await self._written(seen, parameters)
        if parameters.get("do_remote_decode"):
            self.town.written[seen.headers["x-request-id"]].set()
            if seen.body.get("stream"):
                self.seen.append(seen)
                return Answer.stream(*self._chunks(seen)[-2:])
        return await super().answer(seen)

    async def _written(self, seen: Seen, parameters: dict[str, Any]) -> None:
        request_id = seen.headers["x-request-id"]
        if "metaserver" in parameters:
            asked = {"request_id": f"chatcmpl-{request_id}", "do_remote_decode": True}
            await self.town.client.post(parameters["metaserver"].removeprefix("http://router:1"), asked)
        await self.town.written[request_id].wait()


class Town:
    """Two of each, and a router in front."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.began = 0.0
        self.written: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.prefillers = [self._engine(f"p{number}", Role.PRODUCER) for number in range(2)]
        self.decoders = [self._engine(f"d{number}", Role.CONSUMER) for number in range(2)]

    def _engine(self, name: str, role: Role) -> Engine:
        endpoints = [KvEndpoint(engine_id=name, host="10.0.0.1", port=5600)] if self.mode == "push" else []
        said = contract(role, kv_connectors=[CONNECTORS[self.mode]], kv_endpoints=endpoints)
        return Engine(f"http://{name}:1", said, mode=self.mode, town=self)

    async def statuses(self, troubled: Iterable[Engine], trouble: Trouble) -> list[int]:
        async with self.running():
            await self._ask(WARM_UP)
            self.began = asyncio.get_running_loop().time()
            for engine in troubled:
                engine.trouble = trouble
            return await self._ask(REQUESTS)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        engines = [*self.prefillers, *self.decoders]
        settings = settings_for(engines, callback_url="http://router:1")
        loop = asyncio.get_running_loop()
        self.app = RouterApp(settings, FakeUpstream(engines), clock=loop.time)
        self.client = Client(self.app)
        await self.app.start()
        try:
            yield
        finally:
            await self.app.close()

    async def _ask(self, count: int) -> list[int]:
        asked = []
        for number in range(count):
            asked.append(asyncio.ensure_future(self._one(number)))
            await asyncio.sleep(1 / REQUESTS_PER_SECOND)
        return list(await asyncio.gather(*asked))

    async def _one(self, number: int) -> int:
        for engine in self.decoders:
            engine.holds = number % 3 > 0
        body: dict[str, Any] = {"stream": number % 2 > 0} | ({"n": 2} if number % 7 == 0 else {})
        session = None if number % 5 == 0 else f"s{number % 20}"
        return (await self.client.chat(session, user=f"{number} of {self.began}", **body)).status

    def most_dispatches(self) -> int:
        """Of any one request."""
        seen = [seen for engine in (*self.prefillers, *self.decoders) for seen in engine.seen if is_counted(seen)]
        return max(Counter(one.body["user"] for one in seen).values())


def is_counted(seen: Seen) -> bool:
    """Whether something may come of it: neither a look at the engine, nor what has the KV of a lost request dropped."""
    return bool(seen.raw) and (seen.body.get("max_tokens") != 1 or seen.body["kv_transfer_params"]["do_remote_decode"])


TROUBLES: list[Trouble] = [refused, failing, failing_late, cut, full, hanging, slow]
FLAPPING: list[Trouble] = [
    *(flapping(trouble, seconds) for trouble in (refused, failing) for seconds in (0.5, 3.0, 20.0)),
    flapping(cut, 3.0),
]


CASES = [(where, trouble) for where in ("p", "d", "pd") for trouble in TROUBLES]
CASES += [("pd", trouble) for trouble in FLAPPING]


@pytest.mark.parametrize(("where", "trouble"), CASES, ids=[f"{where}-{trouble.__name__}" for where, trouble in CASES])
@pytest.mark.parametrize("mode", CONNECTORS)
def test_while_one_of_each_is_well_requests_are_served(mode: str, where: str, trouble: Trouble) -> None:
    town = Town(mode)
    troubled = [pool[0] for pool, letter in ((town.prefillers, "p"), (town.decoders, "d")) if letter in where]
    statuses = simulate(town.statuses(troubled, trouble))
    assert statuses.count(200) >= SERVED, Counter(statuses)
    assert town.most_dispatches() <= 5
