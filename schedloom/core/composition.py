"""From configuration to one immutable set of policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pluggy
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, model_validator

from schedloom.core.claims import conflicts
from schedloom.core.errors import ConfigurationError, PolicyCrashed, in_a_line
from schedloom.core.errors import complaints as explained
from schedloom.core.hooks import Side, check_hooks, hooks_of, side_of, specified_hooks
from schedloom.core.hookspecs import PROJECT, SPECIFICATIONS
from schedloom.core.policy import Policy
from schedloom.core.registry import Registry
from schedloom.core.settings import StrictSettings

if TYPE_CHECKING:
    from typing_extensions import Self


class PolicyChoice(StrictSettings):
    """One entry of ``policies``: the policy's name, and its settings beside it."""

    model_config = ConfigDict(extra="allow")

    name: str
    """The policy's name."""

    _path: str = PrivateAttr("")

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @property
    def path(self) -> str:
        """Where in its document the policy was chosen; empty when nobody said."""
        return self._path

    def at(self, path: str) -> PolicyChoice:
        """The same choice, known to stand at ``path``."""
        placed = self.model_copy()
        placed._path = path
        return placed


class ChoosingSettings(StrictSettings):
    """Settings of one side, which choose policies by name, and some by a switch too."""

    @property
    def choices(self) -> list[PolicyChoice]:
        """The policies that are on."""
        return []

    @property
    def switches(self) -> Mapping[str, str]:
        """Keys that switch one policy on, each with the policy's name."""
        return {}

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        chosen = {choice.name for choice in self.choices}
        for key, name in self.switches.items():
            if name in chosen and key in self.model_fields_set and not getattr(self, key):
                raise ValueError(
                    f"{key} is false, but policies name {name!r}, which it stands for; drop one of the two"
                )
        return self


@dataclass(frozen=True, slots=True)
class Hook:
    """One policy's implementation of one hook, ready to be called with all of the hook's arguments by position."""

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


@dataclass(frozen=True, slots=True)
class Review:
    """Chosen policies as far as they can be built, and all that is wrong with the choice, one sentence each;
    ``crashed`` tells whether one raised when it was to be made.
    """

    policies: tuple[Policy, ...]
    complaints: tuple[str, ...]
    crashed: bool = False


def compose(choices: Sequence[PolicyChoice], registry: Registry | None = None, side: Side | None = None) -> PolicySet:
    """Build the policies that ``choices`` name, for one ``side`` or for both.

    The order of ``choices`` does not matter: policies stand in the order of their names. Raises ConfigurationError
    with the complaints of ``review``, PolicyCrashed where a policy raised; what has none is a composition.
    """
    found = review(choices, registry, side)
    if found.complaints:
        raise (PolicyCrashed if found.crashed else ConfigurationError)(*found.complaints)
    return PolicySet(found.policies, _hook_table(found.policies))


def review(choices: Sequence[PolicyChoice], registry: Registry | None = None, side: Side | None = None) -> Review:
    """Look at every choice and every pair of them.

    Complained of are an unknown or twice named policy, one that cannot be imported or was written for newer hooks, a
    method that implements no existing hook, unfitting settings, a policy with nothing to do on ``side``, and two
    policies that cannot be on together.
    """
    registry = registry or Registry()
    names = sorted(choice.name for choice in choices)
    complaints = [
        f"policy {name!r} is named {names.count(name)} times; name it once"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    policies: dict[str, Policy] = {}
    crashed = False
    for choice in sorted(choices, key=lambda choice: choice.name):
        try:
            policies[choice.name] = _build(choice, registry, side)
        except ConfigurationError as error:
            complaints += error.sentences
            crashed = crashed or isinstance(error, PolicyCrashed)
    built = tuple(policies.values())
    return Review(built, (*complaints, *map(str, conflicts(built))), crashed)


def _build(choice: PolicyChoice, registry: Registry, side: Side | None) -> Policy:
    try:
        policy = registry.load(choice.name)
        check_hooks(policy)
        _check_side(policy, side)
    except ConfigurationError as error:
        raise ConfigurationError(f"{choice.path}: {error}" if choice.path else str(error)) from error
    try:
        settings = policy.Settings.model_validate(choice.settings)
    except ValidationError as error:
        found = explained(error, policy.Settings, choice.path)
        raise ConfigurationError(*(f"policy {policy.name!r}: {sentence}" for sentence in found)) from error
    return _make(policy, settings, choice.path)


def _make(policy: type[Policy], settings: BaseModel, path: str) -> Policy:
    try:
        return policy(settings)
    except ConfigurationError:
        raise
    except Exception as error:
        sentence = f"policy {policy.name!r} cannot be made of its settings: {in_a_line(error)}"
        raise PolicyCrashed(f"{path}: {sentence}" if path else sentence) from error


def _check_side(policy: type[Policy], side: Side | None) -> None:
    sides = {side_of(hook) for hook in hooks_of(policy)}
    if side and side not in sides:
        raise ConfigurationError(
            f"policy {policy.name!r} has no hook that the {side} calls; choose it for the {' or '.join(sides)}"
        )


def _hook_table(policies: Sequence[Policy]) -> dict[str, tuple[Hook, ...]]:
    manager = pluggy.PluginManager(PROJECT)
    for specification in SPECIFICATIONS:
        manager.add_hookspecs(specification)
    for policy in policies:
        manager.register(policy, name=policy.name)
    hooks = {name: _resolve(manager, name, parameters) for name, parameters in specified_hooks().items()}
    return {name: implementations for name, implementations in hooks.items() if implementations}


def _resolve(manager: pluggy.PluginManager, name: str, specified: tuple[str, ...]) -> tuple[Hook, ...]:
    implementations = getattr(manager.hook, name).get_hookimpls()
    hooks = [Hook(impl.plugin_name, _with_all(impl.function, impl.argnames, specified)) for impl in implementations]
    return tuple(sorted(hooks, key=lambda hook: hook.policy))


def _with_all(function: Callable[..., Any], wanted: Sequence[str], specified: Sequence[str]) -> Callable[..., Any]:
    """``function`` taking the hook's whole list of arguments by position, whichever of them it wants."""
    if tuple(wanted) == tuple(specified):
        return function
    match [specified.index(name) for name in wanted]:
        case []:
            return lambda *arguments: function()
        case [place]:
            return lambda *arguments: function(arguments[place])
        case places:
            chosen = itemgetter(*places)
            return lambda *arguments: function(*chosen(arguments))
