"""Which hooks there are, which a policy implements, and what is wrong with an implementation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from inspect import Parameter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from schedloom.core.errors import ConfigurationError, suggestion
from schedloom.core.hookspecs import PROJECT, SPECIFICATIONS, EngineHooks, RouterHooks

if TYPE_CHECKING:
    from schedloom.core.policy import Policy

Side = Literal["engine", "router"]

_SIDES: Final[Mapping[Side, type]] = {"engine": EngineHooks, "router": RouterHooks}
_MARK: Final = f"{PROJECT}_impl"


@cache
def specified_hooks() -> Mapping[str, tuple[str, ...]]:
    """The parameters of every hook, by the hook's name, in the order of the specifications."""
    hooks = ((name, spec) for family in SPECIFICATIONS for name, spec in vars(family).items() if name[0] != "_")
    return MappingProxyType({name: tuple(inspect.signature(spec).parameters)[1:] for name, spec in hooks})


def side_of(hook: str) -> Side:
    """Who calls ``hook``."""
    return next(side for side, family in _SIDES.items() if hook in vars(family))


def hooks_of(policy: type[Policy]) -> dict[str, Callable[..., Any]]:
    """The methods of ``policy`` that are marked with ``@hookimpl``, by the name of the hook they implement."""
    methods = ((name, getattr(policy, name, None)) for name in dir(policy))
    marked = ((name, method) for name, method in methods if isinstance(getattr(method, _MARK, None), dict))
    return {getattr(method, _MARK)["specname"] or name: method for name, method in marked if method is not None}


def check_hooks(policy: type[Policy]) -> None:
    """Raises ConfigurationError, in one sentence, for the first method that would not be called as it expects."""
    implemented = hooks_of(policy)
    for complaint in _complaints(policy, implemented):
        raise ConfigurationError(f"policy {policy.name!r}: {complaint}")


def _complaints(policy: type[Policy], implemented: Mapping[str, Callable[..., Any]]) -> list[str]:
    specified = specified_hooks()
    complaints = [_complaint(name, method, specified.get(name)) for name, method in implemented.items()]
    for name in specified:
        if callable(getattr(policy, name, None)) and name not in implemented:
            complaints.append(f"{name}() is not marked: write @hookimpl above it, or give it another name")
    if not implemented:
        complaints.append(f"it implements no hook, so it would do nothing; hooks are: {', '.join(specified)}")
    return [complaint for complaint in complaints if complaint]


def _complaint(name: str, method: Callable[..., Any], specified: tuple[str, ...] | None) -> str | None:
    if specified is None:
        return f"there is no hook named {name!r}; {suggestion(name, specified_hooks(), 'hooks')}"
    options = getattr(method, _MARK)
    if options["wrapper"] or options["hookwrapper"]:
        return f"{name}() is a hook wrapper, and policies do not wrap each other: answer for yourself"
    if inspect.iscoroutinefunction(method):
        return f"{name}() is asynchronous, and nobody awaits it: write def without async"
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        if parameter.kind is not Parameter.POSITIONAL_OR_KEYWORD:
            return f"{name}() must name the parameters that it wants one by one, of {', '.join(specified)}"
        if parameter.name not in specified and parameter.default is Parameter.empty:
            return f"the hook {name} has no parameter {parameter.name!r}; {suggestion(parameter.name, specified)}"
    return None
