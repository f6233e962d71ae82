"""Tiers that other rooms bring: the router on a simulated network, real engines. Found by their entry points."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

from schedloom.conformance import subjects
from schedloom.conformance.applicability import settle
from schedloom.conformance.mutants import Mutant
from schedloom.conformance.results import Case, CellResult
from schedloom.conformance.verdicts import Verdict, Violation
from schedloom.core.errors import ConfigurationError

GROUP = "schedloom.tiers"

PATIENCE = 4
"""So many times as many seeds as a case is planned with, while what it needs has not happened."""


class Tier(Protocol):
    """Cases, and what becomes of one of them under a seed."""

    @property
    def side(self) -> str:
        """Whose policies it tries: "engine" or "router"."""
        ...

    @property
    def strength(self) -> int:
        """0: all cases are played. Otherwise so many that every combination of this many factors is: each policy's
        being there, and the ``engine_axes()`` of a case."""
        ...

    @property
    def invariants(self) -> Sequence[str]: ...

    def cases(self, sets: Sequence[tuple[str, ...]], profile: str) -> Sequence[Case]:
        """The cases of these sets of policies, all of which compose."""
        ...

    def seeds(self, profile: str) -> int:
        """How many a case is played with; up to ``PATIENCE`` times as many where what it needs does not happen."""
        ...

    def needs(self, case: Any) -> Sequence[str]:
        """The events without which nothing was tried."""
        ...

    def play(self, case: Any, seed: int) -> Mapping[str, Any]:
        """``steps``, a number; ``events``, counts by name; ``violations``, pairs of an invariant and a sentence.

        A tier with known-bad subjects of its own also takes the registry that has them. Raises ConfigurationError when
        it cannot be played here.
        """
        ...


def names() -> list[str]:
    return sorted(point.name for point in entry_points(group=GROUP))


def load(name: str) -> Tier:
    """Raises ConfigurationError when what the tier needs is not installed."""
    (point,) = [point for point in entry_points(group=GROUP) if point.name == name]
    try:
        tier: Tier = point.load()()
    except ImportError as error:
        raise ConfigurationError(f"tier {name} cannot be run here: {error}") from error
    return tier


def examine(case: Case, name: str, profile: str, first_seed: int) -> CellResult:
    """Play one case in this process, until it breaks or all of its seeds are through. A refusal is a verdict."""
    began = time.perf_counter()
    tier = load(name)
    result = CellResult(case, Verdict.INCONCLUSIVE, tier=name)
    try:
        _play(tier, result, first_seed, tier.seeds(profile))
    except ConfigurationError as error:
        result.verdict, result.missing = Verdict.REFUSED, [str(error)]
    result.seconds = time.perf_counter() - began
    return result


def hunt(mutant: Mutant, seeds: int) -> tuple[int, str] | None:
    """The first seed with which ``mutant`` is accused of what it breaks, and of what it is accused."""
    tier: Any = load(mutant.tier)
    (case,) = tier.cases([mutant.cell.policies], "core")
    registry = subjects.with_faults((mutant.fault,))
    for seed in range(seeds):
        for invariant, message in tier.play(case, seed, registry)["violations"]:
            if invariant == mutant.dies_on:
                return seed, message
    return None


def _play(tier: Tier, result: CellResult, first_seed: int, least: int) -> None:
    for seed in range(first_seed, first_seed + PATIENCE * least):
        if result.seeds >= least and not _missing(tier, result):
            break
        played = tier.play(result.cell, seed)
        result.seeds += 1
        result.steps += played["steps"]
        result.events.update(played["events"])
        if played["violations"]:
            result.violations = [Violation(invariant, message, 0) for invariant, message in played["violations"]]
            result.failing_seed = seed
            break
    result.invariants = dict.fromkeys(tier.invariants, Verdict.PASSED)
    settle(result, _missing(tier, result))


def _missing(tier: Tier, result: CellResult) -> list[str]:
    return [event for event in tier.needs(result.cell) if not result.events[event]]
