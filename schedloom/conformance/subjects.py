"""What is tested: policies by name, with settings that fit the size of the laboratory's sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from schedloom.core.composition import PolicyChoice, PolicySet, compose
from schedloom.core.errors import ConfigurationError
from schedloom.core.hooks import hooks_of
from schedloom.core.hookspecs import EngineHooks
from schedloom.core.policy import Policy
from schedloom.core.registry import Registry


def reads_peers(names: Sequence[str]) -> bool:
    """Whether some of these policies look at the load of other data-parallel ranks."""
    return any(policy.reads_peers for policy in plain(tuple(names)))


@cache
def plain(names: tuple[str, ...]) -> tuple[Policy, ...]:
    """The installed policies ``names``, composed. They are to be asked about themselves, and about no request."""
    return tuple(build(names).policies)


def build(names: Sequence[str], registry: Registry | None = None, faults: Iterable[type] = ()) -> PolicySet:
    """The composition of ``names``, newly built, with those of ``faults`` that are a policy's. Raises
    ConfigurationError when it is refused."""
    registry = with_faults(faults, registry)
    return compose([PolicyChoice(name=name, **settings_of(name, registry)) for name in names], registry)


def with_faults(faults: Iterable[type], registry: Registry | None = None) -> Registry:
    """``registry``, in which those of ``faults`` that are a policy's stand before it."""
    of_policies = [fault for fault in faults if hasattr(fault, "policy")]
    registry = registry or _installed()
    return _Faulty(registry, of_policies) if of_policies else registry


def asked_in_reverse(policies: PolicySet) -> PolicySet:
    """The same policies, asked in the reverse order wherever several are."""
    return replace(policies, hooks={name: hooks[::-1] for name, hooks in policies.hooks.items()})


def settings_of(name: str, registry: Registry) -> dict[str, Any]:
    """The settings with which policy ``name`` wants to be tested."""
    chosen = registry.load(name).conformance_settings
    return {} if chosen is None else chosen.model_dump(exclude_unset=True)


def engine_policies(registry: Registry | None = None) -> list[str]:
    """The installed policies that an engine calls. One that cannot be loaded is left out: see ``unloadable``."""
    registry = registry or _installed()
    broken = unloadable(registry)
    hooks = {name: hooks_of(registry.load(name)) for name in registry.names() if name not in broken}
    return [name for name, implemented in hooks.items() if any(hasattr(EngineHooks, hook) for hook in implemented)]


def unloadable(registry: Registry | None = None) -> dict[str, str]:
    """The installed policies that cannot be loaded, with the reason."""
    registry = registry or _installed()
    reasons: dict[str, str] = {}
    for name in registry.names():
        try:
            registry.load(name)
        except ConfigurationError as error:
            reasons[name] = str(error)
    return reasons


class _Faulty(Registry):
    """Another registry, in which mutant mix-ins stand before the policies that they name."""

    def __init__(self, registry: Registry, faults: Iterable[Any]) -> None:
        self._registry, self._faults = registry, faults

    def names(self) -> list[str]:
        return self._registry.names()

    def load(self, name: str) -> type[Policy]:
        base = self._registry.load(name)
        faults = tuple(fault for fault in self._faults if fault.policy == name)
        return type(base.__name__, (*faults, base), {}) if faults else base


@cache
def _installed() -> Registry:
    return Registry()
