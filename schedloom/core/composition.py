"""From configuration to one immutable set of policies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pluggy
from pydantic import BaseModel, ConfigDict, ValidationError

from schedloom.core.errors import ConfigurationError
from schedloom.core.hookspecs import PROJECT, SPECIFICATIONS
from schedloom.core.policy import Policy
from schedloom.core.registry import Registry


class PolicyChoice(BaseModel):
    """One entry of ``policies``: the policy's name, and its settings beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


@dataclass(frozen=True, slots=True)
class Hook:
    """One policy's implementation of one hook, ready to be called with all of the hook's arguments by keyword."""

    policy: str
    call: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class PolicySet:
    """The policies of one process. ``hooks`` has an entry for every hook that somebody implements."""

    policies: tuple[Policy, ...]
    hooks: Mapping[str, tuple[Hook, ...]]

    @property
    def names(self) -> list[str]:
        return [policy.name for policy in self.policies]

    def of(self, hook: str) -> tuple[Hook, ...]:
        return self.hooks.get(hook, ())


def compose(choices: Sequence[PolicyChoice], registry: Registry | None = None) -> PolicySet:
    """Build the policies that ``choices`` name.

    The order of ``choices`` does not matter: policies stand in the order of their names. Raises ConfigurationError
    for an unknown or twice named policy, unfitting settings, or a method that implements no existing hook.
    """
    registry = registry or Registry()
    names = [choice.name for choice in choices]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"policy {name!r} is named {names.count(name)} times; name it once")
    ordered = sorted(choices, key=lambda choice: choice.name)
    policies = tuple(_build(registry.load(choice.name), choice.settings) for choice in ordered)
    return PolicySet(policies, _hook_table(policies))


def _build(policy: type[Policy], settings: dict[str, Any]) -> Policy:
    try:
        return policy(policy.Settings.model_validate(settings))
    except ValidationError as error:
        raise ConfigurationError(f"policy {policy.name!r}: {explain(error, policy.Settings)}") from error


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first complaint of ``error`` in one sentence, with the nearest known key for an unknown one."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "the section"
    if first["type"] == "extra_forbidden":
        from difflib import get_close_matches

        known = sorted(model.model_fields)
        close = get_close_matches(str(first["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(known) or 'none'}"
        return f"unknown key {where!r}; {hint}"
    return f"{where}: {first['msg']}"


def _hook_table(policies: Sequence[Policy]) -> dict[str, tuple[Hook, ...]]:
    manager = pluggy.PluginManager(PROJECT)
    for specification in SPECIFICATIONS:
        manager.add_hookspecs(specification)
    try:
        for policy in policies:
            manager.register(policy, name=policy.name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise ConfigurationError(
            f"policy {getattr(error.plugin, 'name', error.plugin)!r}: {' '.join(str(error).split())}"
        ) from error
    hooks = {name: _resolve(manager, name) for name in _hook_names()}
    return {name: implementations for name, implementations in hooks.items() if implementations}


def _hook_names() -> list[str]:
    return [name for spec in SPECIFICATIONS for name in vars(spec) if not name.startswith("_")]


def _resolve(manager: pluggy.PluginManager, name: str) -> tuple[Hook, ...]:
    implementations = getattr(manager.hook, name).get_hookimpls()
    specified = _parameters(name)
    hooks = [Hook(impl.plugin_name, _with_all(impl.function, impl.argnames, specified)) for impl in implementations]
    return tuple(sorted(hooks, key=lambda hook: hook.policy))


def _parameters(name: str) -> tuple[str, ...]:
    function = next(vars(spec)[name] for spec in SPECIFICATIONS if name in vars(spec))
    return tuple(inspect.signature(function).parameters)[1:]


def _with_all(function: Callable[..., Any], wanted: Sequence[str], specified: Sequence[str]) -> Callable[..., Any]:
    """``function`` taking the hook's whole list of arguments by position, whichever of them it wants."""
    if tuple(wanted) == tuple(specified):
        return function
    places = [(name, specified.index(name)) for name in wanted]
    return lambda *arguments: function(**{name: arguments[place] for name, place in places})
