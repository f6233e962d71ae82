"""A run of the suite: which cells, in which order, on how many workers, and until when."""

from __future__ import annotations

import platform
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from itertools import count, islice
from typing import Any

from schedloom.conformance import composition, coverage, covering, examination, pure, routing, subjects, tiers
from schedloom.conformance.cells import Cell, legal_cells
from schedloom.conformance.laboratory import Laboratory, load_laboratory
from schedloom.conformance.mutants import MUTANTS, Mutant
from schedloom.conformance.results import CellResult, MutantResult, RunResult, cell_id
from schedloom.conformance.trial import Trial, hunt, try_cell
from schedloom.conformance.verdicts import Verdict, Violation
from schedloom.conformance.workers import Workers
from schedloom.core.errors import ConfigurationError, suggestion

TIERS = ("T0", "T1", "T2", "mutants")
MUTANT_SEEDS = 28
TOWN_SEEDS = 100
"""Those of simulated routers, of which one run is short and shows little."""
SOAK_SEED = 1_000
"""Soaks begin so far behind the seeds of the cells."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Profile:
    """How much of T2 is tried: every combination of ``strength`` factors, the factors being an engine's axes and each
    policy's being there; in each cell at least ``seeds``, each for ``steps``."""

    strength: int
    seeds: int
    steps: int


PROFILES = {
    "core": Profile(strength=3, seeds=examination.LEAST_SEEDS, steps=200),
    "full": Profile(strength=4, seeds=examination.LEAST_SEEDS, steps=300),
}


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

    @property
    def strength(self) -> int:
        return PROFILES[self.profile].strength


def run(order: Order) -> RunResult:
    """Raises ConfigurationError when there is nothing to run or no engine to run it on."""
    began = time.monotonic()
    until = began + order.budget if order.budget is not None else float("inf")
    result = empty_result(order)
    with Workers(order.workers) as workers:
        _run_tiers(order, workers, until, result)
    result.seconds = time.monotonic() - began
    return result


def _run_tiers(order: Order, workers: Workers, until: float, result: RunResult) -> None:
    sides = _sides(order.subject)
    if "engine" in sides:
        _run_engine_tiers(order, workers, until, result)
    if "T0" in order.tiers and "router" in sides:
        routed = routing.examine(order.subject)
        result.composed += len(routed.accepted) + len(routed.refused)
        result.composition += routed.violations
        result.refusals += routed.refusals
    for name in order.tiers:
        if name not in TIERS:
            _play_tier(name, order, workers, until, result)
    result.cells.sort(key=lambda found: (found.tier, found.cell.label()))


def _sides(subject: str | None) -> set[str]:
    """Who calls ``subject``. Raises ConfigurationError when nobody does."""
    called = {"engine": subjects.engine_policies(), "router": routing.routing_policies()}
    sides = {side for side, names in called.items() if subject is None or subject in names}
    if not sides:
        advice = suggestion(str(subject), [*called["engine"], *called["router"]], "installed")
        raise ConfigurationError(f"there is no policy {subject!r}; {advice}")
    return sides


def _run_engine_tiers(order: Order, workers: Workers, until: float, result: RunResult) -> None:
    if "T1" in order.tiers:
        _examine_models(order, workers, until, result)
    if not {"T0", "T2", "mutants"} & set(order.tiers) and not order.soak:
        return
    found = composition.examine(cells_of(order))
    if "T0" in order.tiers:
        result.composed = len(found.accepted) + len(found.refused)
        result.composition, result.refusals = [*found.violations, *_unloadable(order)], found.refusals
    if "T2" in order.tiers and found.accepted:
        _examine_cells(order, found.accepted, workers, until, result)
    if "mutants" in order.tiers and order.cell is None:
        _hunt_mutants(order, workers, until, result)
    if order.soak:
        _soak(order, found.accepted, workers, until, result)


def default_tiers(profile: str) -> tuple[str, ...]:
    """In the core profile those that take minutes; otherwise all that are installed."""
    others = tiers.names()
    return (*TIERS, *(others if profile == "full" else [name for name in others if name in ("R1", "T3")]))


def _play_tier(name: str, order: Order, workers: Workers, until: float, result: RunResult) -> None:
    """One that cannot be played here is no pass."""
    try:
        tier = tiers.load(name)
    except ConfigurationError as error:
        result.unavailable[name] = str(error)
        return
    legal = tier.cases(_sets_of(tier, order), order.profile)
    cases = _cases_of(tier, legal, order)
    examine = partial(tiers.examine, name=name, profile=order.profile, first_seed=order.first_seed)
    played = 0
    for played, found in enumerate(workers.each(examine, cases, until), 1):
        result.cells.append(found)
        order.progress(name, played, len(cases))
    result.out_of_budget |= played < len(cases)
    if tier.strength and order.cell is None:
        result.coverage[name] = _coverage_of(name, tier.strength, legal, result)


def case_of(name: str) -> tuple[str, Any] | None:
    """The case with this id that is no cell of an engine, and its tier's name."""
    for model in models_of(Order(profile="full", cell=name)):
        return "T1", model
    for tier_name in tiers.names():
        order = Order(profile="full", cell=name)
        try:
            tier = tiers.load(tier_name)
        except ConfigurationError:
            continue
        for case in _cases_of(tier, tier.cases(_sets_of(tier, order), order.profile), order):
            return tier_name, case
    return None


def _sets_of(tier: tiers.Tier, order: Order) -> list[tuple[str, ...]]:
    if tier.side not in _sides(order.subject):
        return []
    if tier.side == "router":
        return routing.examine(order.subject).accepted
    return [policies for policies in composition.policy_sets(order.subject) if composition.composes(policies)]


def _cases_of(tier: tiers.Tier, legal: Sequence[Any], order: Order) -> list[Any]:
    if order.cell is not None:
        return [case for case in legal if cell_id(case) == order.cell]
    if not (tier.strength and legal):
        return list(legal)
    rows = [tuple(factors.values()) for factors in factors_of(legal)]
    return [legal[place] for place in covering.cover(rows, tier.strength)]


def _coverage_of(name: str, strength: int, legal: Sequence[Any], result: RunResult) -> coverage.Coverage:
    tried = {found.cell for found in result.cells if found.tier == name and found.verdict is not Verdict.REFUSED}
    factors = factors_of(legal)
    ran = [axes for case, axes in zip(legal, factors, strict=True) if case in tried]
    return coverage.count(ran, factors, strength)


def cases(order: Order) -> list[tuple[str, Any]]:
    """The cases of each tier that the order names, to be examined one by one: of T0, which is no matter of cases, none.

    Raises ConfigurationError when a tier cannot be run here.
    """
    return [(name, case) for name in order.tiers for case in _cases_in(name, order)]


def _cases_in(name: str, order: Order) -> Sequence[Any]:
    if name not in TIERS:
        tier = tiers.load(name)
        return _cases_of(tier, tier.cases(_sets_of(tier, order), order.profile), order)
    if name == "mutants":
        return list(MUTANTS)
    if name == "T0" or "engine" not in _sides(order.subject):
        return []
    return models_of(order) if name == "T1" else chosen(order, composition.examine(cells_of(order)).accepted)[0]


def examine_case(name: str, case: Any, order: Order) -> CellResult:
    """Examine one of the ``cases`` of tier ``name`` in this process, known-bad subjects excepted."""
    if name == "T1":
        return pure.examine(case, order.first_seed)
    if name == "T2":
        return examine_here(case, order.first_seed, order.profile)
    return tiers.examine(case, name, order.profile, order.first_seed)


def empty_result(order: Order) -> RunResult:
    return RunResult(order.subject, order.profile, list(order.tiers), order.first_seed, _environment(order))


def _unloadable(order: Order) -> list[Violation]:
    """A run over everything that is installed fails for what cannot be loaded; a run over one subject does not."""
    broken = subjects.unloadable() if order.subject is None else {}
    return [Violation("COMP-2", reason, 0) for reason in broken.values()]


def cells_of(order: Order) -> list[Cell]:
    """The cells of the policy sets that the order asks for, on some engines of every kind. Raises ConfigurationError
    when there is none."""
    sets = composition.policy_sets(order.subject)
    if order.cell is not None:
        cells = list(islice((cell for cell in legal_cells(sets) if cell_id(cell) == order.cell), 1))
    else:
        cells = [replace(engine, policies=policies) for policies in sets for engine in some_engines(order.strength)]
    if not cells:
        what = f"cell {order.cell!r}" if order.cell else f"policy {order.subject!r} that an engine calls"
        raise ConfigurationError(f"there is no {what}; see `schedloom conformance list`")
    return cells


@cache
def some_engines(strength: int) -> list[Cell]:
    """Engines of every kind, as many as have every interaction of ``strength`` axes that engines of that kind have. So
    whatever can be met with policies on any engine, as far as covering asks for it, can be met on one of these."""
    kinds: dict[Any, list[Cell]] = defaultdict(list)
    for engine in legal_cells([()]):
        kinds[composition.kind_of(engine)].append(engine)
    rows = {kind: [tuple(engine.axes().values()) for engine in engines] for kind, engines in kinds.items()}
    return [engines[place] for kind, engines in kinds.items() for place in covering.cover(rows[kind], strength)]


def chosen(order: Order, accepted: list[Cell]) -> tuple[list[Cell], list[Cell]]:
    """The cells to try, and those among which their interactions were to be covered."""
    if order.cell is not None:
        return accepted, accepted
    rows = [tuple(factors.values()) for factors in factors_of(accepted)]
    return [accepted[place] for place in covering.cover(rows, order.strength)], accepted


def factors_of(cells: Sequence[Any]) -> list[dict[str, Any]]:
    """What is to be combined in each of ``cells``: each policy's being there, and the axes of the engine."""
    names = sorted({name for cell in cells for name in cell.policies})
    return [{f"policy {name}": name in cell.policies for name in names} | cell.engine_axes() for cell in cells]


def models_of(order: Order) -> list[pure.Model]:
    """The cases of T1: every set that composes, in the core profile triples left out."""
    sets = composition.policy_sets(order.subject)
    wanted = [policies for policies in sets if order.profile == "full" or len(policies) != 3]
    models = [model for model in map(pure.Model, wanted) if order.cell in (None, cell_id(model))]
    return [model for model in models if composition.composes(model.policies)]


def _examine_models(order: Order, workers: Workers, until: float, result: RunResult) -> None:
    models = models_of(order)
    before = len(result.cells)
    for done, found in enumerate(workers.each(partial(pure.examine, first_seed=order.first_seed), models, until), 1):
        result.cells.append(found)
        order.progress("models", done, len(models))
    result.out_of_budget |= len(result.cells) - before < len(models)


def _examine_cells(order: Order, accepted: list[Cell], workers: Workers, until: float, result: RunResult) -> None:
    cells, legal = chosen(order, accepted)
    examine = partial(examine_here, first_seed=order.first_seed, profile=order.profile)
    for done, found in enumerate(workers.each(examine, cells, until), 1):
        result.cells.append(found)
        order.progress("cells", done, len(cells))
    result.out_of_budget |= sum(found.tier == "T2" for found in result.cells) < len(cells)
    _count_coverage(order, result, legal)


def count_coverage(order: Order, result: RunResult) -> None:
    """Count what the cells of ``result`` cover of the accepted part of the matrix."""
    _count_coverage(order, result, chosen(order, composition.examine(cells_of(order)).accepted)[1])


def _count_coverage(order: Order, result: RunResult, legal: list[Cell]) -> None:
    result.coverage["T2"] = _coverage_of("T2", order.strength, legal, result)


@cache
def laboratory() -> Laboratory:
    return load_laboratory()


def examine_here(cell: Cell, first_seed: int, profile: str) -> CellResult:
    """Examine one cell in this process. A refusal by the engine itself is a verdict, not an error."""
    wanted = PROFILES[profile]
    try:
        return examination.examine(laboratory(), cell, first_seed, wanted.seeds, steps=wanted.steps)
    except ConfigurationError as error:
        return CellResult(cell, Verdict.REFUSED, missing=[str(error)])


def _hunt_mutants(order: Order, workers: Workers, until: float, result: RunResult) -> None:
    for done, found in enumerate(workers.each(hunt_here, MUTANTS, until), 1):
        result.mutants.append(found)
        order.progress("known-bad subjects", done, len(MUTANTS))
    result.mutants.sort(key=lambda found: list(MUTANTS).index(found.name))
    result.out_of_budget |= len(result.mutants) < len(MUTANTS)


def hunt_here(name: str) -> MutantResult:
    """Look for one known-bad subject in this process."""
    mutant = MUTANTS[name]
    found = _hunted(mutant)
    seed, message = found or (None, "")
    return MutantResult(name, mutant.dies_on, found is not None, seed, message)


def _hunted(mutant: Mutant) -> tuple[int, str] | None:
    if mutant.is_policy:
        return pure.hunt(mutant, MUTANT_SEEDS)
    if mutant.tier:
        return tiers.hunt(mutant, TOWN_SEEDS)
    trial = hunt(laboratory(), mutant, MUTANT_SEEDS)
    return None if trial is None else (trial.seed, _accusation(trial.violations, mutant.dies_on))


def _accusation(violations: Iterable[Violation], invariant: str) -> str:
    return next(found.message for found in violations if found.invariant == invariant)


def _soak(order: Order, accepted: list[Cell], workers: Workers, until: float, result: RunResult) -> None:
    cells, _ = chosen(order, accepted)
    first = order.first_seed + SOAK_SEED
    for trial in workers.each(try_here, ((cell, seed) for seed in count(first) for cell in cells), until):
        result.soak_steps += trial.steps
        result.soak_seeds = (first, trial.seed)
        order.progress("soak steps", min(result.soak_steps, order.soak), order.soak)
        if trial.violations:
            result.cells.append(examination.failed(laboratory(), trial))
        if trial.violations or result.soak_steps >= order.soak:
            return
    result.out_of_budget = True


def try_here(tried: tuple[Cell, int]) -> Trial:
    """Try one cell with one seed in this process. A refusal by the engine itself is no step at all."""
    cell, seed = tried
    try:
        return try_cell(laboratory(), cell, seed)
    except ConfigurationError:
        return Trial(cell, seed, 0, Counter(), (), ())


def _environment(order: Order) -> dict[str, str]:
    described = {"schedloom": version("schedloom"), "python": platform.python_version()}
    if {"T2", "mutants"} & set(order.tiers):
        described["engine"] = laboratory().version
    return described
