"""T0 of the router: every set of routing policies is accepted, or refused with a name and a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, permutations

from schedloom.conformance import subjects
from schedloom.conformance.verdicts import Violation, raised
from schedloom.core.composition import PolicyChoice, compose
from schedloom.core.errors import ConfigurationError, PolicyCrashed
from schedloom.core.hooks import hooks_of
from schedloom.core.hookspecs import RouterHooks
from schedloom.core.registry import Registry

LARGEST = 3
"""Sets of at most so many policies are composed, in every order, and the set of all once."""


@dataclass(slots=True)
class Routing:
    """What was found. ``refusals`` counts sets by the reason for which they are refused."""

    accepted: list[tuple[str, ...]] = field(default_factory=list)
    refused: list[tuple[str, ...]] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)


def routing_policies(registry: Registry | None = None) -> list[str]:
    """The installed policies that the router calls. One that cannot be loaded is left out."""
    registry = registry or Registry()
    loadable = [name for name in registry.names() if name not in subjects.unloadable(registry)]
    return [name for name in loadable if any(hasattr(RouterHooks, hook) for hook in hooks_of(registry.load(name)))]


def examine(subject: str | None = None, registry: Registry | None = None) -> Routing:
    """Compose every set that ``subject`` is in. COMP-2 is broken by a crash, a refusal that names nobody, or an order
    that matters."""
    registry = registry or Registry()
    names = routing_policies(registry)
    sizes = sorted({*range(min(LARGEST, len(names)) + 1), len(names)})
    found = Routing()
    for chosen in chain.from_iterable(combinations(names, size) for size in sizes):
        if subject is None or subject in chosen:
            _examine(chosen, registry, found)
    return found


def _examine(names: tuple[str, ...], registry: Registry, found: Routing) -> None:
    orders: list[Sequence[str]] = list(permutations(names)) if len(names) <= LARGEST else [names]
    try:
        outcomes = {_refusal(order, registry) for order in orders}
    except Exception as error:
        found.violations.append(_violation(names, raised(error)))
        return
    if len(outcomes) > 1:
        found.violations.append(_violation(names, f"it depends on the order: {sorted(map(str, outcomes))}"))
    reason = outcomes.pop()
    if reason is None:
        found.accepted.append(names)
        return
    found.refused.append(names)
    found.refusals[reason] += 1
    if not any(repr(name) in reason for name in names):
        found.violations.append(_violation(names, f"refused without a name: {reason}"))


def _refusal(names: Sequence[str], registry: Registry) -> str | None:
    choices = [PolicyChoice(name=name, **subjects.settings_of(name, registry)) for name in names]
    try:
        compose(choices, registry, side="router")
    except PolicyCrashed:
        raise
    except ConfigurationError as error:
        return str(error)
    return None


def _violation(names: Sequence[str], message: str) -> Violation:
    return Violation("COMP-2", f"router {'+'.join(names) or 'without a policy'}: {message}", 0)
