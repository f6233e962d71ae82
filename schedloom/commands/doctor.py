"""``schedloom doctor``."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points, version

import typer
from rich.text import Text

from schedloom.commands.console import console
from schedloom.core.diagnosis import DOCTORS, Finding, Health
from schedloom.core.errors import ConfigurationError
from schedloom.core.hooks import check_hooks
from schedloom.core.registry import Registry

_STYLES = {Health.OK: "green", Health.WARN: "yellow", Health.FAIL: "bold red"}
_OLDEST_PYTHON = (3, 10)


def doctor() -> None:
    """Say what this environment can run, and what is wrong with it.

    Exits with status 1 when something that is installed cannot work.
    """
    out, failed = console(), False
    for finding in examine():
        failed |= finding.health is Health.FAIL
        label = Text(f"{finding.health.value:<5}", style=_STYLES[finding.health])
        out.print(Text.assemble(label, f"{finding.part:<16} {finding.sentence}"), soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """Everything that is known about this environment."""
    yield _python(sys.version_info[:2])
    yield Finding(Health.OK, "schedloom", version("schedloom"))
    yield from _policies()
    for point in sorted(entry_points(group=DOCTORS), key=lambda point: point.name):
        yield from _ask(point)


def _python(found: tuple[int, int]) -> Finding:
    if found >= _OLDEST_PYTHON:
        return Finding(Health.OK, "Python", f"{platform.python_version()} on {platform.platform()}")
    wanted = ".".join(map(str, _OLDEST_PYTHON))
    return Finding(Health.FAIL, "Python", f"{platform.python_version()} is too old; schedloom needs {wanted}")


def _policies() -> Iterator[Finding]:
    try:
        registry = Registry()
    except ConfigurationError as error:
        yield Finding(Health.FAIL, "policies", str(error))
        return
    for name in registry.names():
        yield _policy(name, registry)


def _policy(name: str, registry: Registry) -> Finding:
    try:
        check_hooks(registry.load(name))
    except ConfigurationError as error:
        return Finding(Health.FAIL, "policy", str(error))
    return Finding(Health.OK, "policy", f"{name} of {registry.package(name)}")


def _ask(point: EntryPoint) -> Iterator[Finding]:
    try:
        yield from point.load()()
    except Exception as error:
        yield Finding(Health.FAIL, point.name, f"cannot be examined: {type(error).__name__}: {error}")
