"""T2: a cell is tried with seed after seed, until it breaks or everything it is to try has happened."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from schedloom.conformance import applicability
from schedloom.conformance.cells import Cell
from schedloom.conformance.laboratory import Laboratory
from schedloom.conformance.results import CellResult
from schedloom.conformance.script import Act
from schedloom.conformance.shrinking import shrink
from schedloom.conformance.trial import Trial, compare_with_stock, replay, try_cell
from schedloom.conformance.verdicts import Verdict, Violation
from schedloom.conformance.weather import CLIMATES

LEAST_SEEDS = len(CLIMATES)
MOST_SEEDS = 8 * LEAST_SEEDS

Tick = Callable[[Trial], None]


def examine(
    laboratory: Laboratory,
    cell: Cell,
    first_seed: int = 0,
    least: int = LEAST_SEEDS,
    most: int = MOST_SEEDS,
    faults: Iterable[type] = (),
    tick: Tick = lambda trial: None,
) -> CellResult:
    """At least ``least`` seeds, and up to ``most`` while some event that the cell must meet has not happened."""
    began = time.perf_counter()
    invariants = applicability.applicable(cell)
    result = CellResult(cell, Verdict.INCONCLUSIVE)
    for seed in range(first_seed, first_seed + most):
        trial = try_cell(laboratory, cell, seed, faults=faults)
        tick(trial)
        _add(result, trial)
        result.violations = [*trial.violations, *_compared(laboratory, trial, result, faults)]
        result.invariants, result.missing = applicability.verdicts(cell, invariants, result.events, _ids(result))
        if result.violations:
            result.failing_seed = seed
            result.script = _shortest(laboratory, trial, result.violations, faults)
            break
        if result.seeds >= least and not result.missing:
            break
    result.verdict = _verdict(result)
    result.seconds = time.perf_counter() - began
    return result


def _add(result: CellResult, trial: Trial) -> None:
    result.seeds += 1
    result.steps += trial.steps
    result.events += trial.events


def _compared(laboratory: Laboratory, trial: Trial, result: CellResult, faults: Iterable[type]) -> list[Violation]:
    """COMP-1, once in a cell: the same acts on the engine's own scheduler."""
    if trial.violations or result.events["compared"]:
        return []
    result.events["compared"] += 1
    return compare_with_stock(laboratory, trial, faults)


def _ids(result: CellResult) -> set[str]:
    return {violation.invariant for violation in result.violations}


def _verdict(result: CellResult) -> Verdict:
    if result.violations:
        return Verdict.FAILED
    return Verdict.INCONCLUSIVE if result.missing else Verdict.PASSED


def _shortest(
    laboratory: Laboratory, trial: Trial, violations: Sequence[Violation], faults: Iterable[type]
) -> list[Act]:
    wanted = violations[0].invariant
    cell = replace(trial.cell, seed=trial.seed)
    if wanted == "COMP-1":
        return list(trial.script)

    def breaks_it(acts: Sequence[Act]) -> bool:
        again = replay(laboratory, cell, acts, faults)
        return wanted in {violation.invariant for violation in again.violations}

    return shrink(trial.script, breaks_it)


def soak(
    laboratory: Laboratory, cells: Sequence[Cell], steps: int, first_seed: int, until: float, tick: Tick
) -> tuple[int, Trial | None]:
    """Go round ``cells`` with new seeds for ``steps`` steps in all, or until the clock reads ``until``.

    Returns the steps that were made, and the first trial that broke anything.
    """
    done = 0
    seeds: Counter[Cell] = Counter()
    while done < steps and time.monotonic() < until:
        for cell in cells:
            trial = try_cell(laboratory, cell, first_seed + seeds[cell])
            seeds[cell] += 1
            done += trial.steps
            tick(trial)
            if trial.violations:
                return done, trial
            if done >= steps or time.monotonic() >= until:
                break
    return done, None


def failed(laboratory: Laboratory, trial: Trial) -> CellResult:
    """The result of a cell of which one trial is known, and that it broke something."""
    result = CellResult(trial.cell, Verdict.FAILED, violations=list(trial.violations), failing_seed=trial.seed)
    _add(result, trial)
    result.invariants = dict.fromkeys(sorted(_ids(result)), Verdict.FAILED)
    result.script = _shortest(laboratory, trial, trial.violations, ())
    return result
