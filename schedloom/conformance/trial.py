"""A trial: one cell, one seed, so many steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
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
    for step, (expected, found) in enumerate(zip(stock, composed, strict=False)):
        for what in expected:
            if expected[what] != found[what]:
                message = f"{what}: {found[what]}, the engine's own scheduler {expected[what]}"
                return [Violation("COMP-1", message, step)]
    if len(stock) != len(composed):
        message = f"{len(composed)} steps, the engine's own scheduler takes {len(stock)}"
        return [Violation("COMP-1", message, len(stock))]
    return []


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


def hunt(laboratory: Laboratory, mutant: Mutant, seeds: int) -> Trial | None:
    """The first trial in which ``mutant`` is accused of what it breaks, of ``seeds`` at most."""
    for seed in range(mutant.seed, mutant.seed + seeds):
        trial = try_cell(laboratory, mutant.cell, seed, faults=(mutant.fault,))
        if not trial.violations and mutant.dies_on == "COMP-1":
            differences = compare_with_stock(laboratory, trial, (mutant.fault,))
            trial = replace(trial, violations=tuple(differences))
        if mutant.dies_on in {violation.invariant for violation in trial.violations}:
            return trial
    return None
