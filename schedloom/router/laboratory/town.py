"""A whole router on a simulated clock, in front of a simulated fleet, with clients that come and go."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schedloom.core.registry import Registry
from schedloom.core.wire import Role
from schedloom.router.app import RouterApp
from schedloom.router.http.upstream import Upstream
from schedloom.router.laboratory import GUESSING_POLICY
from schedloom.router.laboratory.client import Client, Received
from schedloom.router.laboratory.engines import (
    HEALTH_INTERVAL,
    LEASE,
    MODEL,
    Faults,
    Ledger,
    SimulatedEngine,
)
from schedloom.router.laboratory.ownership import Ownership
from schedloom.router.laboratory.upstream import SimulatedUpstream
from schedloom.router.settings import OWNER_POLICY, RouterSettings, router_settings

HANDOFF = 10.0
PROMPT = "a" * 3000
CONTINUATIONS = 3
ANSWERED = {"messages": [{"role": "assistant", "content": "an answer"}]}
"""What shows a router that a turn follows another: a completion's prompt, which engines here go by, does not."""
PASSIVE, WHOLE = 0.2, 0.15
"""The shares of Decoders that turn nobody away, and of requests that cannot be split."""


@dataclass
class Turn:
    label: str
    session: str | None
    stream: bool
    left: bool
    received: Received
    seconds: float = 0.0


class Town:
    """One simulated fleet under one seed. ``append``: local attempts are made, whoever is named for it."""

    pace = 1.0
    """Seconds that a client's second of thinking takes."""
    most_dispatches = 5
    """Of one client's request, when nobody hands it back."""
    rest = 2 * LEASE
    """Seconds after the last answer in which whatever holds KV must let it go."""

    def __init__(
        self,
        seed: int,
        faults: Faults | None = None,
        healthy: int = 0,
        policies: Sequence[str] = (),
        append: bool = True,
        registry: Registry | None = None,
    ) -> None:
        self.append = append
        self.registry = registry or Registry()
        self.policies = [{"name": name, **self._settings_of(name)} for name in policies]
        self.random = random.Random(seed)
        self.ledger = Ledger()
        roles = [Role.PRODUCER] * self.random.randint(1, 3) + [Role.CONSUMER] * self.random.randint(1, 3)
        self.engines = [
            SimulatedEngine(f"http://e{n}:1", role, self.random, faults or Faults.any(self.random))
            for n, role in enumerate(roles)
        ]
        for engine in (self.engines[0], self.engines[-1])[: 2 * healthy]:
            engine.faults = Faults()
        for engine in self.engines:
            engine.recomputes = engine.role is Role.CONSUMER and self.random.random() < 0.7
        self.turns: list[Turn] = []
        self._oddities = random.Random(~seed)
        for engine in self.engines:
            engine.passive = engine.role is Role.CONSUMER and self._oddities.random() < PASSIVE

    def _settings_of(self, name: str) -> dict[str, Any]:
        chosen = self.registry.load(name).conformance_settings
        return {} if chosen is None else chosen.model_dump(exclude_unset=True)

    async def play(self, clients: int = 4, turns: int = 4) -> None:
        settings = router_settings(
            {
                "workers": [{"url": engine.origin} for engine in self.engines],
                "enable_decoder_append_prefill": self.append,
                "policies": self.policies,
                "handoff_timeout_seconds": HANDOFF,
                "request_timeout_seconds": 2000,
                "health_interval_seconds": HEALTH_INTERVAL,
                "max_continuations": CONTINUATIONS,
            }
        )
        loop = asyncio.get_running_loop()
        upstream, chance = self._upstream(), random.Random(0)
        self.app = RouterApp(settings, upstream, clock=loop.time, chance=chance, registry=self.registry)
        if isinstance(upstream, SimulatedUpstream):
            upstream.ownership = self._ownership(settings)
        await self.app.start()
        await asyncio.gather(*[self._client(number, turns) for number in range(clients)])
        await asyncio.sleep(self.rest)
        await self.app.close()

    def _ownership(self, settings: RouterSettings) -> Ownership | None:
        chosen = next((choice for choice in settings.choices if choice.name == OWNER_POLICY), None)
        if chosen is None:
            return None
        wanted: Any = self.registry.load(OWNER_POLICY).Settings.model_validate(chosen.settings)
        guesses = any(choice.name == GUESSING_POLICY for choice in settings.choices)
        return Ownership(self.app, wanted.max_lead, guesses)

    def _upstream(self) -> Upstream | None:
        return SimulatedUpstream(self.engines, self.ledger)

    async def _client(self, number: int, turns: int) -> None:
        session = None if self.random.random() < 0.2 else f"s{number}"
        for turn in range(turns):
            await asyncio.sleep(self.pace * self.random.uniform(0, 3))
            await self._turn(f"{number}.{turn}", session, ANSWERED if turn else {})

    async def _turn(self, label: str, session: str | None, before: Mapping[str, Any]) -> None:
        client = Client(self.app)
        stream = self.random.random() < 0.6
        body = {"model": MODEL, "prompt": PROMPT, "stream": stream, "user": label, **before}
        body |= {"n": 2} if self._oddities.random() < WHOLE else {}
        headers = {"x-schedloom-ttft-slo-ms": "20"} if self.policies and self.random.random() < 0.5 else {}
        headers |= {} if session is None else {"X-Session-ID": session}
        left = self.random.random() < 0.2
        if left:
            loop = asyncio.get_running_loop()
            loop.call_later(self.random.choice([0, 0.001, 0.005, 0.02, 0.1, 7]), client.leave.set)
        asked_at = asyncio.get_running_loop().time()
        received = await client.post("/v1/completions", body, headers)
        seconds = asyncio.get_running_loop().time() - asked_at
        self.turns.append(Turn(label, session, stream, left and client.leave.is_set(), received, seconds))
