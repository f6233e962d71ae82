"""What is tested: policies by name, with settings that fit the size of the laboratory's sequences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from schedloom.core.composition import PolicyChoice, PolicySet, compose
from schedloom.core.errors import ConfigurationError
from schedloom.core.hooks import hooks_of
from schedloom.core.hookspecs import EngineHooks
from schedloom.core.registry import Registry

SMALL: dict[str, dict[str, Any]] = {
    "append_prefill": {"min_reused_tokens": 8, "max_append_tokens": 24},
    "batch_job_aware": {"max_active": 2, "max_wait_seconds": 20},
    "offload_restore": {"min_saved_tokens": 4},
    "short_request_first": {"short_tokens": 8, "max_wait_seconds": 20},
    "tpot_guard": {"min_chunk_tokens": 4, "tpot_ms": 0.01},
}
"""Settings of the built-in policies under which sequences of at most 192 tokens meet both sides of every threshold.

Any other policy says so itself, in a class attribute ``conformance_settings``.
"""

NEVER_REJECT = frozenset({"balance", "batch_job_aware", "phase_separation"})
"""Built-in policies that answer admission questions and never reject.

Any other policy says so itself, in a class attribute ``conformance_never_rejects``.
"""


def settings_of(name: str, registry: Registry) -> dict[str, Any]:
    return SMALL.get(name) or dict(getattr(registry.load(name), "conformance_settings", {}))


def build(names: Sequence[str], registry: Registry | None = None) -> PolicySet:
    """The composition of ``names``, newly built. Raises ConfigurationError when it is refused."""
    registry = registry or _installed()
    return compose([PolicyChoice(name=name, **settings_of(name, registry)) for name in names], registry)


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


@cache
def _installed() -> Registry:
    return Registry()
