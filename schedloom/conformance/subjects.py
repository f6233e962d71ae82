"""What is tested: policies by name, with settings that fit the size of the laboratory's sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schedloom.core.composition import PolicyChoice, PolicySet, compose
from schedloom.core.hooks import hooks_of
from schedloom.core.hookspecs import EngineHooks
from schedloom.core.registry import Registry

SMALL: dict[str, dict[str, Any]] = {
    "append_prefill": {"min_reused_tokens": 8, "max_append_tokens": 24},
}
"""Settings of the built-in policies under which sequences of at most 192 tokens meet both sides of every threshold.

Any other policy says so itself, in a class attribute ``conformance_settings``.
"""


def settings_of(name: str, registry: Registry) -> dict[str, Any]:
    return SMALL.get(name) or dict(getattr(registry.load(name), "conformance_settings", {}))


def build(names: Sequence[str], registry: Registry | None = None) -> PolicySet:
    """The composition of ``names``. Raises ConfigurationError when it is refused."""
    registry = registry or Registry()
    return compose([PolicyChoice(name=name, **settings_of(name, registry)) for name in names], registry)


def engine_policies(registry: Registry | None = None) -> list[str]:
    """The installed policies that an engine calls."""
    registry = registry or Registry()
    hooks = {name: hooks_of(registry.load(name)) for name in registry.names()}
    return [name for name, implemented in hooks.items() if any(hasattr(EngineHooks, hook) for hook in implemented)]
