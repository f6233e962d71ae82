"""A trial: one cell, one seed, so many steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from schedloom.conformance import script, subjects
from schedloom.conformance.bench import Bench, Broken
from schedloom.conformance.cells import Cell
from schedloom.conformance.laboratory import Laboratory
from schedloom.conformance.mutants import Mutant
from schedloom.conformance.verdicts import Violation
from schedloom.conformance.weather import Forecast

TRIAL_STEPS = 300


@dataclass(frozen=True, slots=True)
class Trial:
    """What one trial found. ``script`` holds every act of it, so that it can be done again."""

    cell: Cell
    seed: int
    steps: int
    events: Counter[str]
    violations: tuple[Violation, ...]
    script: tuple[script.Act, ...]
    compared: bool = False


def try_cell(
    laboratory: Laboratory,
    cell: Cell,
    seed: int,
    steps: int = TRIAL_STEPS,
    faults: Iterable[type] = (),
) -> Trial:
    """Random acts from ``seed``, then everything heals and the engine drains.

    Raises ConfigurationError when the engine of ``cell`` refuses the policies.
    """
    bench = open_bench(laboratory, replace(cell, seed=seed), faults)
    forecast = Forecast(bench, seed)
    try:
        while bench.steps < steps:
            bench.do(forecast.next())
        bench.do(script.Drain())
    except Broken:
        pass
    finally:
        bench.close()
    return _trial(bench, cell, seed)


def replay(laboratory: Laboratory, cell: Cell, acts: Iterable[script.Act], faults: Iterable[type] = ()) -> Trial:
    """Do ``acts`` again. Acts on requests that never came do nothing, so any part of a script is a script."""
    bench = open_bench(laboratory, cell, faults)
    try:
        for act in acts:
            bench.do(act)
    except Broken:
        pass
    finally:
        bench.close()
    return _trial(bench, cell, cell.seed)


def open_bench(laboratory: Laboratory, cell: Cell, faults: Iterable[type] = ()) -> Bench:
    return Bench(laboratory, cell, subjects.build(cell.policies, faults=faults), faults)


def _trial(bench: Bench, cell: Cell, seed: int) -> Trial:
    return Trial(cell, seed, bench.steps, bench.events, tuple(bench.violations), tuple(bench.script))


def compare_with_stock(laboratory: Laboratory, trial: Trial, faults: Iterable[type] = ()) -> list[Violation]:
    """COMP-1: do the acts of ``trial`` on the engine's own scheduler, and on one composed of no policies."""
    cell = replace(trial.cell, seed=trial.seed)
    acts = [replace(act, marked=False) if isinstance(act, script.Arrive) else act for act in trial.script]
    stock = _schedule(Bench(laboratory, cell, None), acts)
    composed = _schedule(Bench(laboratory, cell, subjects.build(()), faults), acts)
    return _differences("COMP-1", composed, "the engine's own scheduler", stock)


def compare_orders(laboratory: Laboratory, trial: Trial, faults: Iterable[type] = ()) -> list[Violation]:
    """DET-1: do the acts of ``trial`` again, once with all policies asked in the reverse order."""
    cell = replace(trial.cell, seed=trial.seed)
    policies, others = (subjects.build(cell.policies, faults=faults) for _ in range(2))
    if all(len(hooks) < 2 for hooks in policies.hooks.values()):
        return []
    once = _schedule(Bench(laboratory, cell, policies, faults), trial.script)
    again = _schedule(Bench(laboratory, cell, subjects.asked_in_reverse(others), faults), trial.script)
    return _differences("DET-1", again, "in the usual order", once)


def _differences(
    invariant: str, found: Sequence[dict[str, Any]], otherwise: str, expected: Sequence[dict[str, Any]]
) -> list[Violation]:
    """The first, if there is one."""
    for step, (one, other) in enumerate(zip(found, expected, strict=False)):
        for what in one:
            if one[what] != other[what]:
                return [Violation(invariant, f"{what}: {one[what]}, {otherwise} {other[what]}", step)]
    if len(found) == len(expected):
        return []
    return [Violation(invariant, f"{len(found)} steps, {otherwise} {len(expected)}", min(len(found), len(expected)))]


def _schedule(bench: Bench, acts: Iterable[script.Act]) -> list[dict[str, Any]]:
    """What each step of ``acts`` did."""
    bench.schedule = []
    try:
        for act in acts:
            bench.do(act)
    except Broken:
        pass
    finally:
        bench.close()
    return bench.schedule


COMPARISONS = {"COMP-1": compare_with_stock, "DET-1": compare_orders}
"""What is known only from several runs of the same acts, by its invariant."""


def hunt(laboratory: Laboratory, mutant: Mutant, seeds: int) -> Trial | None:
    """The first trial in which ``mutant`` is accused of what it breaks, of ``seeds`` at most."""
    for seed in range(mutant.seed, mutant.seed + seeds):
        trial = try_cell(laboratory, mutant.cell, seed, faults=(mutant.fault,))
        if not trial.violations and (compare := COMPARISONS.get(mutant.dies_on)):
            trial = replace(trial, violations=tuple(compare(laboratory, trial, (mutant.fault,))))
        if mutant.dies_on in {violation.invariant for violation in trial.violations}:
            return trial
    return None
