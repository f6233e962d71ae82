"""One random schedule on the model, and a set of policies examined by many."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from schedloom.conformance import applicability, subjects
from schedloom.conformance.mutants import Mutant
from schedloom.conformance.oracles import IDLE_LIMIT, OVERTAKES_PER_SEAT
from schedloom.conformance.pure.asking import Asking
from schedloom.conformance.pure.requests import ModelRequest
from schedloom.conformance.pure.scheduler import MAX_RUNNING, NUM_BLOCKS, ModelScheduler
from schedloom.conformance.results import CellResult
from schedloom.conformance.verdicts import Verdict, Violation
from schedloom.core.composition import PolicySet
from schedloom.core.hookspecs import EngineHooks
from schedloom.core.policy import Policy
from schedloom.core.registry import Registry
from schedloom.core.views import PeerLoad

CLIMATES = ((24, 12, 240), (8, 40, 100), (2, 120, 60))
"""Requests at a time, tokens of the longest turn of a conversation, and steps. Seeds go through them in turn."""

PATIENCE = 5
SLACK_STEPS = 200
LONGEST = 120
"""Tokens of history that a turn has at the most."""


@dataclass
class Run:
    """What one schedule did. ``schedule`` has the tokens that each step gave, ``log`` every answer of every policy."""

    schedule: list[dict[str, int]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)


class Play:
    """A random schedule of ``seed``: what happens does not depend on what policies answer, as far as that can be."""

    def __init__(self, policies: PolicySet, seed: int, acts: bool = True) -> None:
        self.run = Run()
        asking = Asking(policies, acts, self._accuse)
        self.scheduler = ModelScheduler(asking, self._accuse, acts)
        self._asking = asking
        self._rng = random.Random(seed)
        self._load, self._longest, self._steps = CLIMATES[seed % len(CLIMATES)]
        self._held: list[int] = []

    def play(self) -> Run:
        for _ in range(self._steps):
            self._disturb()
            self._step()
            if self.run.violations:
                break
        else:
            self._drain()
        self.run.log = self._asking.log
        self.run.events = self.scheduler.events + self._asking.events
        return self.run

    def _accuse(self, invariant: str, message: str) -> None:
        self.run.violations.append(Violation(invariant, message, self.scheduler.steps))

    def _step(self) -> None:
        scheduler = self.scheduler
        self.run.schedule.append(scheduler.step())
        if len(scheduler.running) == MAX_RUNNING and scheduler.waiting:
            scheduler.events["contention"] += 1
        bound = OVERTAKES_PER_SEAT * MAX_RUNNING
        for request in scheduler.waiting:
            if request.overtaken > bound:
                self._accuse("FAIR-1", f"{request.request_id} was overtaken {request.overtaken} times")

    def _disturb(self) -> None:
        rng, scheduler = self._rng, self.scheduler
        drawn = [rng.random() for _ in range(6)]
        if drawn[0] < 0.7 and len(scheduler.waiting) + len(scheduler.running) < self._load:
            self._arrive()
        if drawn[1] < 0.03 and scheduler.running:
            scheduler.end(scheduler.running[int(drawn[5] * len(scheduler.running))], "aborted")
        if drawn[2] < 0.05:
            self._squeeze(int(drawn[5] * NUM_BLOCKS))
        if drawn[3] < 0.1:
            scheduler.peers = [PeerLoad(1, drawn[5], rng.randrange(9), 0, 8, rng.random())]
        if drawn[4] < 0.05:
            scheduler.now += 10 * drawn[5]

    def _arrive(self) -> None:
        rng, scheduler = self._rng, self.scheduler
        number = len(scheduler.requests)
        parent = scheduler.requests.get(f"r{number - rng.randrange(1, 6)}") if rng.random() < 0.6 else None
        history = parent.tokens[:LONGEST] if parent else ()
        fresh = tuple(rng.randrange(1000) for _ in range(rng.randrange(1, self._longest)))
        answer = tuple(rng.randrange(1000) for _ in range(rng.randrange(1, 24)))
        session = parent.session if parent else rng.choice((None, f"s{number}"))
        classes = ("batch", None, None)
        prompt = (history + fresh)[: 2 * LONGEST]
        marked = rng.random() < 0.5
        scheduler.add(ModelRequest(f"r{number}", prompt, answer, scheduler.now, marked, rng.choice(classes), session))

    def _squeeze(self, count: int) -> None:
        """Take blocks away, or give back those that were taken."""
        pool = self.scheduler.pool
        if self._held:
            pool.give_back(self._held)
        self._held = [] if self._held else pool.take(min(count, len(pool.free)))

    def _drain(self) -> None:
        """Everything heals, and the model runs until it is empty."""
        scheduler = self.scheduler
        scheduler.peers = []
        if self._held:
            self._squeeze(0)
        idle = 0
        for _ in range(SLACK_STEPS + 4 * sum(len(request.tokens) for request in scheduler.requests.values())):
            if not (scheduler.waiting or scheduler.running) or self.run.violations:
                break
            self._step()
            idle = 0 if self.run.schedule[-1] else idle + 1
            if idle > IDLE_LIMIT:
                break
        else:
            idle = IDLE_LIMIT + 1
        if idle > IDLE_LIMIT:
            self._accuse("LIVE-1", f"not drained: {[one.request_id for one in scheduler.waiting][:5]} wait for nothing")
        scheduler.events["drained"] += 1


@dataclass(frozen=True, slots=True)
class Model:
    """A case of T1: the model of an engine, with these policies."""

    policies: tuple[str, ...] = ()

    def label(self) -> str:
        return f"{'+'.join(self.policies) or 'no policy'}, on the model"

    def to_plain(self) -> dict[str, Any]:
        return {"policies": list(self.policies)}


def examine(
    model: Model, first_seed: int = 0, seeds: int = len(CLIMATES), registry: Registry | None = None
) -> CellResult:
    """T1 for the policies of ``model``: ``seeds`` schedules, and up to ``PATIENCE`` times as many while something that
    must happen has not. Raises ConfigurationError when they are refused."""
    began = time.perf_counter()
    hooks = [hook for hook in subjects.build(model.policies, registry).hooks if hasattr(EngineHooks, hook)]
    result = CellResult(model, Verdict.INCONCLUSIVE, tier="T1")
    needed = [f"asked {hook}" for hook in hooks]
    for seed in range(first_seed, first_seed + PATIENCE * seeds):
        run = _play(model.policies, seed, registry)
        result.seeds += 1
        result.steps += len(run.schedule)
        result.events += run.events
        result.violations = run.violations or _compared(model.policies, seed, run, registry)
        if result.violations:
            result.failing_seed = seed
            break
        applicability.conclude(result, needed)
        if result.seeds >= seeds and not result.missing:
            break
    applicability.conclude(result, needed)
    result.seconds = time.perf_counter() - began
    return result


class Only(Registry):
    """A registry of one policy, installed or not."""

    def __init__(self, policy: type[Policy]) -> None:
        super().__init__([])
        self._policy = policy

    def load(self, name: str) -> type[Policy]:
        return self._policy


def hunt(mutant: Mutant, seeds: int) -> tuple[int, str] | None:
    """The first seed with which ``mutant``, a policy, is accused of what it breaks, and of what it is accused."""
    policy: type[Policy] = mutant.fault
    registry, names = Only(policy), (policy.name,)
    for seed in range(seeds):
        run = _play(names, seed, registry)
        for found in run.violations or _compared(names, seed, run, registry):
            if found.invariant == mutant.dies_on:
                return seed, found.message
    return None


def _play(names: tuple[str, ...], seed: int, registry: Registry | None, acts: bool = True) -> Run:
    return Play(subjects.build(names, registry), seed, acts).play()


def _compared(names: tuple[str, ...], seed: int, run: Run, registry: Registry | None) -> list[Violation]:
    """The same schedule again, with all asked in another order, in shadow, and with nobody."""
    again = Play(subjects.asked_in_reverse(subjects.build(names, registry)), seed).play()
    if _by_policy(again) != _by_policy(run) or again.schedule != run.schedule:
        return [Violation("DET-1", _difference(run, again), 0)]
    shadow, off = _play(names, seed, registry, acts=False), _play((), seed, registry)
    if shadow.schedule != off.schedule:
        return [Violation("SHADOW-1", _difference(shadow, off), 0)]
    return []


def _by_policy(run: Run) -> list[str]:
    """Each policy's answers in their order: who is asked before whom makes no difference."""
    return sorted(run.log, key=lambda line: line.split(" ", 2)[1])


def _difference(one: Run, other: Run) -> str:
    for place, (left, right) in enumerate(zip(_by_policy(one), _by_policy(other), strict=False)):
        if left != right:
            return f"answer {place} was {left}, and then {right}"[:300]
    steps = (
        step for step, (left, right) in enumerate(zip(one.schedule, other.schedule, strict=False)) if left != right
    )
    return f"step {next(steps, len(one.schedule))} was another"
