"""``schedloom explain``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import yaml

from schedloom.commands.config import ConfigurationFile
from schedloom.commands.console import console, say, table
from schedloom.commands.documents import Document, read_document
from schedloom.commands.examination import Examination, examine
from schedloom.core.claims import owned_by
from schedloom.core.hooks import Side, hooks_of, side_of, specified_hooks
from schedloom.core.policy import Policy
from schedloom.core.registry import Registry


def explain(
    file: ConfigurationFile,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Show what a configuration file amounts to: defaults filled in, who supplies each hook, what is refused and why.

    Exits with status 1 when something is refused.
    """
    document, registry = read_document(file), Registry()
    found = examine(document, registry)
    facts = _facts(document, found, registry)
    say(*(f"{file}: {complaint}" for complaint in found.complaints))
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    elif found.policies or not found.complaints:
        _print(facts)
    if found.complaints:
        raise typer.Exit(1)


def _facts(document: Document, found: Examination, registry: Registry) -> dict[str, Any]:
    return {
        "kind": document.side,
        "configuration": _effective(document, found.policies),
        "hooks": suppliers(found.policies, document.side),
        "policies": {policy.name: _about(policy, registry) for policy in found.policies},
        "refused": list(found.complaints),
        "notes": list(found.notes),
    }


def _effective(document: Document, policies: Sequence[Policy]) -> dict[str, Any]:
    """The configuration with every default filled in; switches and policies show each other."""
    settings = [{"name": policy.name, **policy.settings.model_dump(mode="json")} for policy in policies]
    on = {policy.name for policy in policies}
    switches = {key: name in on for key, name in document.section.switches.items()}
    return {**document.section.model_dump(mode="json"), **switches, "policies": settings}


def suppliers(policies: Sequence[Policy], side: Side) -> dict[str, list[str]]:
    """For every hook of one side, the policies that implement it, in the order in which they are called."""
    hooks = [hook for hook in specified_hooks() if side_of(hook) == side]
    return {hook: sorted(policy.name for policy in policies if hook in hooks_of(type(policy))) for hook in hooks}


def _about(policy: Policy, registry: Registry) -> dict[str, Any]:
    return {
        "package": registry.package(policy.name),
        "needs": policy.requires.needed,
        "owns": sorted(owned_by(type(policy))),
        "refuses": dict(policy.claims.refuses),
    }


def _print(facts: dict[str, Any]) -> None:
    out = console()
    out.print(f"effective configuration ({facts['kind']})", style="bold")
    out.print(yaml.safe_dump(facts["configuration"], sort_keys=False))
    hooks = facts["hooks"].items()
    out.print(table("hook", "called in this order", rows=[(hook, ", ".join(names) or "-") for hook, names in hooks]))
    out.print()
    rows = [
        (name, about["package"], ", ".join(about["needs"]) or "-", ", ".join(about["owns"]) or "-")
        for name, about in facts["policies"].items()
    ]
    out.print(table("policy", "from", "needs", "decides alone", rows=rows) if rows else "no policy is on")
    for note in facts["notes"]:
        out.print(note, soft_wrap=True)
