"""T0: every set of policies on every kind of engine is accepted, or refused with a name and a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations
from typing import Any

from schedloom.conformance import subjects
from schedloom.conformance.cells import Cell
from schedloom.conformance.verdicts import Violation, raised
from schedloom.core.claims import QUEUE_ORDER, owned_by
from schedloom.core.composition import PolicySet
from schedloom.core.errors import ConfigurationError, PolicyCrashed
from schedloom.core.registry import Registry
from schedloom.core.requirements import check_requirements
from schedloom.core.wire import EngineContract, Role

LARGEST_SHUFFLED = 3
"""Sets of at most so many policies are composed in every order."""


@dataclass(slots=True)
class Composition:
    """What T0 found. ``refusals`` counts cells by the reason for which they are refused."""

    accepted: list[Cell] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    refused: list[Cell] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)


def policy_sets(subject: str | None, registry: Registry | None = None) -> list[tuple[str, ...]]:
    """No policy, each one, each pair, each triple, all together, and for each policy a largest set that composes; with
    a subject only sets that it is in."""
    names = subjects.engine_policies(registry)
    sizes = {*range(min(3, len(names)) + 1), len(names)}
    sets = [chosen for size in sorted(sizes) for chosen in combinations(names, size)]
    sets += sorted({_grown(name, names, registry) for name in names} - set(sets))
    return [chosen for chosen in sets if subject is None or subject in chosen]


def _grown(first: str, names: Sequence[str], registry: Registry | None) -> tuple[str, ...]:
    """``first`` and whoever else composes with those before."""
    grown = [first]
    for name in names:
        if name != first and composes([*grown, name], registry):
            grown.append(name)
    return tuple(sorted(grown))


def composes(names: Sequence[str], registry: Registry | None = None) -> bool:
    try:
        subjects.build(names, registry)
    except Exception:
        return False
    return True


def contract_of(cell: Cell) -> EngineContract:
    """What an engine of ``cell`` promises. One that has a connector without a role both sends and receives."""
    return EngineContract(
        role=Role(cell.role if cell.role != "none" or not cell.offload else "both"),
        models=["model"],
        block_size=cell.block_size,
        prefix_caching=cell.prefix_caching,
        kv_connector=("PushConnector" if cell.pushes else "PullConnector") if cell.connects else None,
        saves_preempted_kv=cell.offload,
        max_model_len=cell.max_model_len,
        model_runner=cell.runner,
    )


def kind_of(cell: Cell) -> tuple[Any, ...]:
    """What composition looks at in an engine: on engines of one kind the same sets are refused."""
    return (cell.role, cell.offload, cell.prefix_caching, cell.runner, cell.priority)


class Judge:
    """Says why cells are refused. Each set of policies is composed once, each kind of engine judged once."""

    def __init__(self, registry: Registry | None = None) -> None:
        self._registry = registry
        self._composed: dict[tuple[str, ...], PolicySet | str] = {}
        self._judged: dict[tuple[Any, ...], str | None] = {}

    def refusal(self, cell: Cell) -> str | None:
        """The reason why ``cell`` is refused, or None. Raises what composition raises beside its own error."""
        key = (cell.policies, *kind_of(cell))
        if key not in self._judged:
            self._judged[key] = self._refusal(cell)
        return self._judged[key]

    def _refusal(self, cell: Cell) -> str | None:
        policies = self._compose(cell.policies)
        if isinstance(policies, str):
            return policies
        for policy in policies.policies if cell.priority else ():
            if QUEUE_ORDER in owned_by(type(policy)):
                return f"policy {policy.name!r} and vLLM's priority policy both decide {QUEUE_ORDER}"
        try:
            check_requirements(policies.policies, contract_of(cell))
        except ConfigurationError as error:
            return str(error)
        return None

    def _compose(self, names: tuple[str, ...]) -> PolicySet | str:
        if names not in self._composed:
            try:
                self._composed[names] = subjects.build(names, self._registry)
            except PolicyCrashed:
                raise
            except ConfigurationError as error:
                self._composed[names] = error.sentences[0]
        return self._composed[names]


def examine(cells: Iterable[Cell], registry: Registry | None = None) -> Composition:
    """Compose every cell. COMP-2 is broken by a crash, a refusal that names nobody, or an order that matters."""
    found, judge = Composition(), Judge(registry)
    shuffled: set[tuple[str, ...]] = set()
    for cell in cells:
        try:
            reason = judge.refusal(cell)
        except Exception as error:
            found.violations.append(_violation(cell, raised(error)))
            continue
        if reason is None:
            found.accepted.append(cell)
        else:
            found.refused.append(cell)
            found.refusals[reason] += 1
            found.violations.extend(_unnamed(cell, reason))
        if cell.policies not in shuffled and len(cell.policies) <= LARGEST_SHUFFLED:
            shuffled.add(cell.policies)
            found.violations.extend(_order_matters(cell, registry))
    return found


def _unnamed(cell: Cell, reason: str) -> list[Violation]:
    if any(repr(name) in reason for name in cell.policies):
        return []
    return [_violation(cell, f"refused without a name: {reason}")]


def _order_matters(cell: Cell, registry: Registry | None) -> list[Violation]:
    outcomes = {_outcome(order, registry) for order in permutations(cell.policies)}
    return [] if len(outcomes) == 1 else [_violation(cell, f"it depends on the order: {sorted(outcomes)}")]


def _outcome(names: Sequence[str], registry: Registry | None) -> str:
    try:
        policies: PolicySet = subjects.build(names, registry)
    except ConfigurationError as error:
        return str(error)
    return " ".join(policies.names)


def _violation(cell: Cell, message: str) -> Violation:
    return Violation("COMP-2", f"{cell.label()}: {message}", 0)
