"""The router under test: in process, on a simulated clock and network, in front of engines that fail at random."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from schedloom.core.registry import Registry
from schedloom.router.settings import OWNER_POLICY

GUESSING_POLICY = "rendezvous"
"""Who makes local attempts where no owner is known."""

OWNED = "OWN-1"
"""What the owner policy promises."""

EVERYWHERE = ("OUT-1", "OUT-2", "OUT-3", "REJ-1", "RET-2", "FB-1", "KV-2", "KV-4", "LIVE-1", "OBS-1")


@dataclass(frozen=True, slots=True)
class SimulatedRouter:
    """A router with these policies."""

    policies: tuple[str, ...] = ()
    where: str = "simulated"

    def label(self) -> str:
        return f"router with {'+'.join(self.policies) or 'no policy'}, {self.where}"

    def to_plain(self) -> dict[str, Any]:
        return {"policies": list(self.policies)}


@contextmanager
def _quiet() -> Iterator[None]:
    """Every fault is provoked, thousands of times over: the log would hold nothing else."""
    log = logging.getLogger("schedloom")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


class SimulationTier:
    """R1, registered in the entry-point group ``schedloom.tiers``. One seed is one fleet with its faults."""

    side = "router"
    strength = 0
    invariants: tuple[str, ...] = (*EVERYWHERE, OWNED)

    def cases(self, sets: Sequence[tuple[str, ...]], profile: str) -> list[SimulatedRouter]:
        return [SimulatedRouter(policies) for policies in sets if profile == "full" or len(policies) != 3]

    def seeds(self, profile: str) -> int:
        return 250 if profile == "full" else 25

    def needs(self, case: SimulatedRouter) -> list[str]:
        ways = ["append", "fallback"] if OWNER_POLICY in case.policies else []
        return ["answered", "error", "client left", "pd", *ways]

    def play(self, case: SimulatedRouter, seed: int, registry: Registry | None = None) -> dict[str, Any]:
        from schedloom.router.laboratory.clock import simulate
        from schedloom.router.laboratory.town import Town

        town = Town(seed, policies=case.policies, append=OWNER_POLICY in case.policies, registry=registry)
        with _quiet():
            simulate(town.play())
        return _found(town)


class SocketTier(SimulationTier):
    """R2, registered beside R1: the router's own HTTP client, on sockets of this machine and a real clock."""

    invariants = EVERYWHERE

    def seeds(self, profile: str) -> int:
        return 8

    def cases(self, sets: Sequence[tuple[str, ...]], profile: str) -> list[SimulatedRouter]:
        return [SimulatedRouter(policies, "on sockets") for policies in sets if len(policies) <= 1]

    def play(self, case: SimulatedRouter, seed: int, registry: Registry | None = None) -> dict[str, Any]:
        import asyncio

        from schedloom.router.laboratory.sockets import WiredTown

        town = WiredTown(seed, policies=case.policies, append=OWNER_POLICY in case.policies, registry=registry)
        with _quiet():
            asyncio.run(town.play())
        return _found(town)


def _found(town: Any) -> dict[str, Any]:
    from schedloom.router.laboratory.promises import wrongs_of_town

    events: Counter[str] = Counter()
    for turn in town.turns:
        events["client left"] += turn.left
        events["answered" if turn.received.status == 200 else "error"] += not turn.left
        events[turn.received.headers.get("x-schedloom-decision", "none")] += 1
    return {"steps": sum(town.ledger.dispatches.values()), "events": events, "violations": wrongs_of_town(town)}
