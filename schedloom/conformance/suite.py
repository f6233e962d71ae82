"""A run of the suite: which cells, in which order, on how many workers, and until when."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from multiprocessing import get_context

from schedloom.conformance import composition, coverage, covering, examination, subjects
from schedloom.conformance.cells import Cell, legal_cells
from schedloom.conformance.laboratory import Laboratory, load_laboratory
from schedloom.conformance.mutants import MUTANTS
from schedloom.conformance.results import CellResult, MutantResult, RunResult, cell_id
from schedloom.conformance.trial import Trial, hunt
from schedloom.conformance.verdicts import Verdict, Violation
from schedloom.core.errors import ConfigurationError

TIERS = ("T0", "T2", "mutants")
STRENGTH = {"core": 2, "full": 3}
MUTANT_SEEDS = 28

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Order:
    """What to run.

    ``profile`` is core or full; ``budget`` is in seconds; ``soak`` in steps; ``cell`` picks one cell by its id.
    """

    subject: str | None = None
    profile: str = "core"
    tiers: tuple[str, ...] = TIERS
    first_seed: int = 0
    workers: int = 1
    budget: float | None = None
    soak: int = 0
    cell: str | None = None
    progress: Progress = field(default=lambda what, done, total: None)


def run(order: Order) -> RunResult:
    """Raises ConfigurationError when there is nothing to run or no engine to run it on."""
    began = time.monotonic()
    until = began + order.budget if order.budget is not None else float("inf")
    result = empty_result(order)
    found = composition.examine(cells_of(order))
    if "T0" in order.tiers:
        result.composed = len(found.accepted) + len(found.refused)
        result.composition, result.refusals = [*found.violations, *_unloadable(order)], found.refusals
    if "T2" in order.tiers:
        _examine_cells(order, found.accepted, until, result)
    if "mutants" in order.tiers and order.cell is None:
        _hunt_mutants(order, until, result)
    if order.soak:
        _soak(order, found.accepted, until, result)
    result.seconds = time.monotonic() - began
    return result


def empty_result(order: Order) -> RunResult:
    return RunResult(order.subject, order.profile, list(order.tiers), order.first_seed, _environment(order))


def _unloadable(order: Order) -> list[Violation]:
    """A run over everything that is installed fails for what cannot be loaded; a run over one subject does not."""
    broken = subjects.unloadable() if order.subject is None else {}
    return [Violation("COMP-2", reason, 0) for reason in broken.values()]


def cells_of(order: Order) -> list[Cell]:
    """Every legal cell of the policy sets that the order asks for. Raises ConfigurationError when there is none."""
    sets = composition.policy_sets(order.subject)
    cells = [cell for cell in legal_cells(sets) if order.cell is None or cell_id(cell) == order.cell]
    if not cells:
        what = f"cell {order.cell!r}" if order.cell else f"policy {order.subject!r} that an engine calls"
        raise ConfigurationError(f"there is no {what}; see `schedloom conformance list`")
    return cells


def chosen(order: Order, accepted: list[Cell]) -> tuple[list[Cell], list[Cell]]:
    """The cells to try, and those among which their interactions were to be covered."""
    if order.cell is not None:
        return accepted, accepted
    largest = max((len(cell.policies) for cell in accepted), default=0)
    sizes = {0, 1, 2, largest} if order.profile == "full" or order.subject else {0, 1, largest}
    legal = [cell for cell in accepted if len(cell.policies) in sizes]
    rows = [tuple(cell.axes().values()) for cell in legal]
    return [legal[place] for place in covering.cover(rows, STRENGTH[order.profile])], legal


def _examine_cells(order: Order, accepted: list[Cell], until: float, result: RunResult) -> None:
    cells, legal = chosen(order, accepted)
    for done, found in enumerate(_examined(order, cells, until), 1):
        result.cells.append(found)
        order.progress("cells", done, len(cells))
    result.cells.sort(key=lambda found: found.cell.label())
    result.out_of_budget |= len(result.cells) < len(cells)
    _count_coverage(order, result, legal)


def count_coverage(order: Order, result: RunResult) -> None:
    """Count what the cells of ``result`` cover of the accepted part of the matrix."""
    _count_coverage(order, result, chosen(order, composition.examine(cells_of(order)).accepted)[1])


def _count_coverage(order: Order, result: RunResult, legal: list[Cell]) -> None:
    ran = [found.cell.axes() for found in result.cells if found.verdict is not Verdict.REFUSED]
    result.coverage["T2"] = coverage.count(ran, [cell.axes() for cell in legal], STRENGTH[order.profile])


def _examined(order: Order, cells: list[Cell], until: float) -> Iterator[CellResult]:
    if order.workers <= 1:
        for cell in cells:
            if time.monotonic() >= until:
                return
            yield examine_here(cell, order.first_seed, order.profile)
        return
    with _pool(order.workers) as pool:
        waiting = [pool.submit(examine_here, cell, order.first_seed, order.profile) for cell in cells]
        for future in as_completed(waiting):
            yield future.result()
            if time.monotonic() >= until:
                pool.shutdown(wait=False, cancel_futures=True)
                return


def _pool(workers: int) -> ProcessPoolExecutor:
    # Each worker loads an engine of its own; forking one that has threads is not safe.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"))


@cache
def laboratory() -> Laboratory:
    return load_laboratory()


def examine_here(cell: Cell, first_seed: int, profile: str) -> CellResult:
    """Examine one cell in this process. A refusal by the engine itself is a verdict, not an error."""
    least = examination.LEAST_SEEDS * (1 if profile == "core" else 3)
    try:
        return examination.examine(laboratory(), cell, first_seed, least)
    except ConfigurationError as error:
        return CellResult(cell, Verdict.REFUSED, missing=[str(error)])


def _hunt_mutants(order: Order, until: float, result: RunResult) -> None:
    for done, mutant in enumerate(MUTANTS.values(), 1):
        if time.monotonic() >= until:
            result.out_of_budget = True
            return
        trial = hunt(laboratory(), mutant, MUTANT_SEEDS)
        message = _accusation(trial.violations, mutant.dies_on) if trial else ""
        seed = trial.seed if trial else None
        result.mutants.append(MutantResult(mutant.name, mutant.dies_on, trial is not None, seed, message))
        order.progress("known-bad subjects", done, len(MUTANTS))


def _accusation(violations: Iterable[Violation], invariant: str) -> str:
    return next(found.message for found in violations if found.invariant == invariant)


def _soak(order: Order, accepted: list[Cell], until: float, result: RunResult) -> None:
    done = 0

    def tick(trial: Trial) -> None:
        nonlocal done
        done += trial.steps
        order.progress("soak steps", min(done, order.soak), order.soak)

    cells, _ = chosen(order, accepted)
    steps, broken = examination.soak(laboratory(), cells, order.soak, order.first_seed + 1_000, until, tick)
    result.soak_steps = steps
    if broken is not None:
        result.cells.append(examination.failed(laboratory(), broken))
    result.out_of_budget |= broken is None and steps < order.soak


def _environment(order: Order) -> dict[str, str]:
    described = {"schedloom": version("schedloom"), "python": platform.python_version()}
    if {"T2", "mutants"} & set(order.tiers):
        described["engine"] = laboratory().version
    return described
