"""Simulated engines that fail at random."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from schedloom.core.wire import EngineContract, Role
from schedloom.router.fleet.worker import APPEND_FEATURE, RECOMPUTE_FEATURE
from schedloom.router.http.upstream import BrokenOff, TimedOut, UpstreamRequest, UpstreamResponse

LEASE = 12.0
WORDS = 4
MODEL = "fake-model"
HEALTH_INTERVAL = 20.0
"""Seconds between two looks of the router at an engine."""


@dataclass
class Faults:
    """How likely an engine is to do what, for each request that reaches it."""

    refuse: float = 0.0
    error: float = 0.0
    client_error: float = 0.0
    full: float = 0.0
    hang: float = 0.0
    cut: float = 0.0
    no_parameters: float = 0.0
    restart: float = 0.0
    evict: float = 0.0
    slow: float = 0.0
    hand_back: float = 0.0
    stop: float = 0.0
    """As a process at SIGSTOP: nothing comes from it, not even how it is, until it goes on."""

    @classmethod
    def any(cls, random: random.Random) -> Faults:
        return cls(**{name: random.choice([0, 0, 0, 0.1, 0.4]) for name in cls.__dataclass_fields__})


@dataclass
class SimulatedEngine:
    """A Prefiller keeps leases by request id, a Decoder holds sessions' KV; a restart forgets both."""

    origin: str
    role: Role
    random: random.Random
    faults: Faults
    lives: int = 1
    leases: dict[str, float] = field(default_factory=dict)
    holds: set[str] = field(default_factory=set)
    recomputes: bool = False
    stopped_until: float = -math.inf
    passive: bool = False
    """It has ``append_prefill``, switched off."""

    @property
    def contract(self) -> Any:
        features = [APPEND_FEATURE, RECOMPUTE_FEATURE] if self.recomputes else [APPEND_FEATURE]
        return EngineContract(
            epoch=f"life-{self.lives}",
            role=self.role,
            models=[MODEL],
            block_size=16,
            kv_connectors=["NixlConnector"],
            kv_lease_seconds=LEASE,
            features=features,
            inactive=[APPEND_FEATURE] if self.passive else [],
        )

    def happens(self, fault: str) -> bool:
        return self.random.random() < float(getattr(self.faults, fault))

    def restart(self) -> None:
        self.lives += 1
        self.leases.clear()
        self.holds.clear()


@dataclass
class Ledger:
    """What must never be, in words, and what came in for each client's request."""

    wrongs: list[str] = field(default_factory=list)
    dispatches: dict[str, int] = field(default_factory=dict)
    handed_back: dict[str, int] = field(default_factory=dict)
    answers: Iterator[int] = field(default_factory=lambda: itertools.count(1))


class Patients:
    """Requests at engines that are stopped."""

    def __init__(self) -> None:
        self._given_up: dict[UpstreamRequest, tuple[bool, asyncio.Future[None]]] = {}

    async def wait(self, engine: SimulatedEngine, request: UpstreamRequest, seconds: float, has_begun: bool) -> None:
        """Until ``engine`` goes on. Raises TimedOut after so many ``seconds``, or when ``request`` is given up."""
        loop = asyncio.get_running_loop()
        given_up = loop.create_future()
        end = loop.time() + seconds
        while (now := loop.time()) < engine.stopped_until:
            self._given_up[request] = has_begun, given_up
            try:
                await asyncio.wait({given_up}, timeout=min(end, engine.stopped_until) - now)
            finally:
                del self._given_up[request]
            if given_up.done() or loop.time() >= end:
                raise TimedOut(f"{request.origin} hangs")

    def give_up(self, origin: str) -> int:
        ends = [
            (request, given_up)
            for request, (has_begun, given_up) in self._given_up.items()
            if request.origin == origin and request.waits(has_begun)
        ]
        for request, given_up in ends:
            if request.give_up() and not given_up.done():
                given_up.set_result(None)
        return len(ends)


class SimulatedResponse(UpstreamResponse):
    on_late_answer: Callable[[int, bytes], None] | None = None
    awake: Callable[[bool], Awaitable[None]] | None = None

    def __init__(self, steps: list[bytes | Exception], kind: bytes, status: int, wait: float) -> None:
        self.status = status
        self.headers = [(b"content-type", kind)]
        self._steps = steps
        self._said: list[bytes | Exception] = []
        self._wait = wait

    async def read(self) -> bytes:
        await asyncio.sleep(self._wait)
        if self.awake is not None:
            await self.awake(any(self._said))
        step = self._steps.pop(0) if self._steps else b""
        self._said.append(step)
        if isinstance(step, TimedOut):
            await asyncio.sleep(300)
        if isinstance(step, Exception):
            raise step
        return step

    def break_off_where_silent(self) -> None:
        self._steps = [BrokenOff("silent") if isinstance(step, TimedOut) else step for step in self._steps]

    def close(self) -> None:
        said = [*self._said, *self._steps]
        if b"" not in self._said and self.on_late_answer is not None:
            self.on_late_answer(self.status, b"".join(step for step in said if isinstance(step, bytes)))
        self._steps.clear()
