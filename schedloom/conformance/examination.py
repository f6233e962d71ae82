"""T2: a cell is tried with seed after seed, until it breaks or everything it is to try has happened."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice

from schedloom.conformance import applicability
from schedloom.conformance.cells import Cell
from schedloom.conformance.laboratory import Laboratory
from schedloom.conformance.results import CellResult
from schedloom.conformance.script import Act
from schedloom.conformance.shrinking import shrink
from schedloom.conformance.trial import COMPARISONS, TRIAL_STEPS, Trial, replay, try_cell
from schedloom.conformance.verdicts import Verdict, Violation
from schedloom.conformance.weather import AIMED_SEED, CLIMATES, aimed_seeds

LEAST_SEEDS = len(CLIMATES)
MOST_SEEDS = 8 * LEAST_SEEDS


def examine(
    laboratory: Laboratory,
    cell: Cell,
    first_seed: int = 0,
    least: int = LEAST_SEEDS,
    most: int = MOST_SEEDS,
    faults: Iterable[type] = (),
    steps: int = TRIAL_STEPS,
) -> CellResult:
    """At least ``least`` seeds of ``steps`` each, and up to ``most`` while some event that the cell must meet has not
    happened: from then on some in weather that aims at it."""
    began = time.perf_counter()
    result = CellResult(cell, Verdict.INCONCLUSIVE)
    for seed in islice(_seeds(first_seed, least, result), most):
        trial = try_cell(laboratory, cell, seed, steps, faults)
        _add(result, trial)
        result.violations = [*trial.violations, *_compared(laboratory, trial, result, faults)]
        applicability.conclude(result)
        if result.violations:
            result.failing_seed = seed
            result.script = _shortest(laboratory, trial, result.violations, faults)
            break
        if result.seeds >= least and not result.missing:
            break
    result.seconds = time.perf_counter() - began
    return result


def _seeds(first: int, least: int, result: CellResult) -> Iterator[int]:
    for seed in count(first):
        if seed >= first + least:
            yield from aimed_seeds(result.missing, seed)
        yield seed


def _add(result: CellResult, trial: Trial) -> None:
    result.seeds += 1
    result.aimed += trial.seed >= AIMED_SEED
    result.steps += trial.steps
    result.events += trial.events


def _compared(laboratory: Laboratory, trial: Trial, result: CellResult, faults: Iterable[type]) -> list[Violation]:
    """Once in a cell: the same acts on the engine's own scheduler, and with policies asked in another order."""
    if trial.violations or result.events["compared"]:
        return []
    result.events["compared"] += 1
    return [found for compare in COMPARISONS.values() for found in compare(laboratory, trial, faults)]


def _shortest(
    laboratory: Laboratory, trial: Trial, violations: Sequence[Violation], faults: Iterable[type]
) -> list[Act]:
    wanted = violations[0].invariant
    cell = replace(trial.cell, seed=trial.seed)
    if wanted in COMPARISONS:
        return list(trial.script)

    def breaks_it(acts: Sequence[Act]) -> bool:
        again = replay(laboratory, cell, acts, faults)
        return wanted in {violation.invariant for violation in again.violations}

    return shrink(trial.script, breaks_it)


def failed(laboratory: Laboratory, trial: Trial) -> CellResult:
    """The result of a cell of which one trial is known, and that it broke something."""
    result = CellResult(trial.cell, Verdict.FAILED, violations=list(trial.violations), failing_seed=trial.seed)
    _add(result, trial)
    result.invariants = dict.fromkeys(sorted({found.invariant for found in trial.violations}), Verdict.FAILED)
    result.script = _shortest(laboratory, trial, trial.violations, ())
    return result
