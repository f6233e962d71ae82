"""``schedloom policies``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module, resources
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.markdown import Markdown

from schedloom.commands.console import complain, console, table
from schedloom.core.claims import owned_by
from schedloom.core.errors import ConfigurationError
from schedloom.core.hooks import check_hooks, hooks_of, side_of
from schedloom.core.policy import Policy
from schedloom.core.registry import Registry


def policies(
    name: Annotated[str | None, typer.Argument(help="Show this one in full.", show_default=False)] = None,
) -> None:
    """List the installed policies, or show one: what it does, its settings and its claims.

    Exits with status 1 when an installed policy cannot be used.
    """
    registry = Registry()
    if name is None:
        _list(registry)
    else:
        _show(name, registry)


def _list(registry: Registry) -> None:
    rows, complaints = [], []
    for name in registry.names():
        try:
            rows.append((name, *_summary(_usable(name, registry)), _origin(name, registry)))
        except ConfigurationError as error:
            complaints.append(str(error))
    console().print(table("policy", "side", "hooks", "from", rows=rows))
    if complaints:
        complain(*complaints)


def _usable(name: str, registry: Registry) -> type[Policy]:
    policy = registry.load(name)
    check_hooks(policy)
    return policy


def _summary(policy: type[Policy]) -> tuple[str, str]:
    hooks = hooks_of(policy)
    return ", ".join(sorted({side_of(hook) for hook in hooks})), ", ".join(sorted(hooks))


def _origin(name: str, registry: Registry) -> str:
    return registry.package(name) + (" (built in)" if registry.is_built_in(name) else "")


def _show(name: str, registry: Registry) -> None:
    policy, out = _usable(name, registry), console()
    side, hooks = _summary(policy)
    out.print(f"{name} - {_origin(name, registry)}", style="bold")
    out.print(inspect.getdoc(policy) or "", end="\n\n")
    out.print(table("about", "", rows=[("side", side), ("hooks", hooks), *_claims(policy)]))
    out.print()
    _print_settings(policy.Settings, out)
    readme = _readme(policy) or _description(name, registry)
    if readme:
        out.print()
        out.print(Markdown(readme))


def _claims(policy: type[Policy]) -> list[tuple[str, str]]:
    refused = [(f"refuses {other}", reason) for other, reason in sorted(policy.claims.refuses.items())]
    alone = ", ".join(sorted(owned_by(policy)))
    return [("needs", ", ".join(policy.requires.needed) or "-"), ("decides alone", alone or "-"), *refused]


def _print_settings(model: type[BaseModel], out: Console) -> None:
    properties = model.model_json_schema().get("properties", {})
    if not properties:
        out.print("no settings")
        return
    rows = [
        (key, type_of(about), _default(about), " ".join(about.get("description", "").split()))
        for key, about in properties.items()
    ]
    out.print(table("setting", "type", "default", "meaning", rows=rows))


def _default(about: Mapping[str, Any]) -> str:
    return str(about["default"]) if "default" in about else "required"


_LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def type_of(about: Mapping[str, Any]) -> str:
    """What ``about``, the JSON Schema of a setting, lets it be, in a few words."""
    if "anyOf" in about:
        return " or ".join(type_of(option) for option in about["anyOf"])
    if "enum" in about:
        return " or ".join(map(str, about["enum"]))
    if "const" in about:
        return str(about["const"])
    if "items" in about:
        return f"list of {type_of(about['items'])}"
    name = about.get("type") or about.get("$ref", "anything").rsplit("/", 1)[-1]
    return " ".join([name, *(f"{sign} {about[limit]}" for limit, sign in _LIMITS.items() if limit in about)])


def _readme(policy: type[Policy]) -> str | None:
    """The README.md that lies in the package of the policy's module."""
    module = import_module(policy.__module__)
    if not module.__package__:
        return None
    file = resources.files(module.__package__) / "README.md"
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _description(name: str, registry: Registry) -> str | None:
    """The README that a third party's package was built with."""
    distribution = registry.distribution(name)
    if distribution is None or registry.is_built_in(name):
        return None
    return str(distribution.metadata.get_payload())  # type: ignore[attr-defined]
