"""Writes the parts of docs/ that are made from the code: docs/reference and docs/schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import typer

from schedloom.cli import app
from schedloom.commands.documents import section_models
from schedloom.commands.policies import type_of
from schedloom.commands.schema import json_schema
from schedloom.core.registry import GROUP, Registry
from schedloom.router.app import RouterApp
from schedloom.router.settings import router_settings

DOCS = Path(__file__).resolve().parent.parent / "docs"
COMMANDS = """# Commands

Made from the code by `scripts/reference.py`. Every command ends with status 0 when all is well, with status 1 and one
sentence on standard error for each thing that is not, and with status 2 when it was called wrongly.
"""
SETTINGS = """# Settings

Made from the code by `scripts/reference.py`: everything that a configuration file may hold. Times are in seconds,
sizes in bytes. [Configuration](../configuration.md) says where these files stand; each policy's settings are in the
README beside it, and `schedloom policies NAME` shows them.
"""


def main() -> None:
    for path, text in made().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def made() -> dict[Path, str]:
    """Every file that is made from the code, with what it should hold."""
    commands = "\n".join([COMMANDS, *(describe(name, command) for name, command in walk(typer.main.get_command(app)))])
    schemas = {DOCS / "schema" / f"{side}.json": schema(side) for side in ("engine", "router")}
    openapi = json.dumps(described_router().openapi, indent=2) + "\n"
    pages = {"commands.md": commands, "openapi.json": openapi, "settings.md": settings()}
    return {DOCS / "reference" / name: text for name, text in pages.items()} | schemas


def described_router() -> RouterApp:
    """A router that is never started."""
    return RouterApp(router_settings({"workers": [{"url": "http://127.0.0.1:8000"}]}))


def schema(side: Any) -> str:
    """Only this project's policies, whatever else is installed."""
    built_in = Registry(point for point in entry_points(group=GROUP) if point.dist and point.dist.name == "schedloom")
    return json.dumps(json_schema(side, built_in), indent=2) + "\n"


def settings() -> str:
    """A table of the settings of each side, and of what they are made of."""
    parts = [
        part for side in ("router", "engine") for part in _tables(side, section_models()[side].model_json_schema())
    ]
    return "\n".join([SETTINGS, *dict.fromkeys(parts)])


def _tables(side: str, schema: dict[str, Any]) -> Iterator[str]:
    inner = schema.get("$defs", {})
    yield _table(f"The {side}", schema, inner)
    for name in sorted(inner):
        if "properties" in inner[name]:
            yield _table(name, inner[name], inner)


def _table(title: str, model: dict[str, Any], inner: dict[str, Any]) -> str:
    head = "| key | type | default | meaning |\n|---|---|---|---|"
    rows = [f"| `{key}` | {_row(about, inner)} |" for key, about in model["properties"].items()]
    return "\n".join([f"## {title}", "", model["description"], "", head, *rows, ""])


def _row(about: dict[str, Any], inner: dict[str, Any]) -> str:
    named = inner.get(about.get("$ref", "").rsplit("/", 1)[-1], {})
    shape = type_of(named if "enum" in named else about).removesuffix(" or null")
    return " | ".join([shape, _default(about), " ".join(about["description"].split())])


def _default(about: dict[str, Any]) -> str:
    if "default" not in about:
        return "required"
    return "none" if about["default"] in (None, []) else json.dumps(about["default"])


def walk(command: Any, name: str = "schedloom") -> Iterator[tuple[str, Any]]:
    """Every command that does something, with its full name, in the order of names."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, inner in sorted(command.commands.items()):
        yield from walk(inner, f"{name} {word}")


def describe(name: str, command: Any) -> str:
    rows = [row(parameter) for parameter in command.params if parameter.name != "help"]
    table = ["", "| argument or option | meaning |", "|---|---|", *rows] if rows else []
    return "\n".join([f"## {name}", "", command.help.strip(), *table, ""])


def row(parameter: Any) -> str:
    """One parameter: an argument in capitals, an option as it is written."""
    spelled = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.opts[0].upper()
    default = getattr(parameter.default, "value", parameter.default)
    known = f" Default: {default}." if isinstance(default, (str, int, float)) and default is not False else ""
    return f"| `{spelled}` | {' '.join((parameter.help or '').split())}{known} |"


if __name__ == "__main__":
    main()
