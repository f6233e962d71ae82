"""``schedloom new-policy``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from importlib.metadata import version
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from string import Template
from typing import Annotated, Final

import typer

from schedloom.commands.console import console
from schedloom.core.errors import ConfigurationError
from schedloom.core.registry import Registry

_TEMPLATES: Final = {
    "pyproject.toml": "pyproject.toml.template",
    "README.md": "README.md.template",
    "src/$module/__init__.py": "src/init.py.template",
    "src/$module/policy.py": "src/policy.py.template",
    "src/$module/py.typed": None,
    "tests/test_$policy.py": "tests/test_policy.py.template",
}

_IMPORTED: Final = (
    "Admission",
    "Annotated",
    "Field",
    "Policy",
    "PolicySettings",
    "RequestView",
    "Requirements",
    "Verdict",
)
"""What the policy's template imports."""


def new_policy(
    name: Annotated[str, typer.Argument(help="The policy's name in configuration, such as tenant_quota.")],
    directory: Annotated[
        Path | None, typer.Option(help="Where to write; by default a new folder named after the package.")
    ] = None,
) -> None:
    """Write a complete policy package: pyproject, entry point, a policy that works, README and tests.

    Writes nothing at all when one of the files is already there.
    """
    names = names_for(name)
    folder = directory or Path(names["distribution"])
    write_package(folder, names)
    console().print(
        f"wrote {names['distribution']} to {folder}\n"
        f"next: cd {folder} && pip install /path/to/schedloom -e '.[test]' && pytest && schedloom policies "
        f"{names['policy']}  # /path/to/schedloom is its checkout",
        soft_wrap=True,
    )


def names_for(name: str) -> dict[str, str]:
    """All names of the package. Raises ConfigurationError for a taken name, and for what cannot name a module."""
    policy = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", policy):
        rule = "write lower-case words joined by _ or -, a letter first, such as tenant_quota"
        raise ConfigurationError(f"{name!r} cannot name a policy; {rule}")
    if iskeyword(policy):
        raise ConfigurationError(f"{name!r} is a word of Python's own; choose another name, such as {policy}_policy")
    registry = Registry()
    if policy in registry.names():
        raise ConfigurationError(f"{policy!r} is the name of a policy of {registry.package(policy)}; choose another")
    module = f"schedloom_{policy}"
    if find_spec(module) is not None:
        raise ConfigurationError(f"{name!r} makes a module {module}, which is installed already; choose another name")
    class_name = "".join(word.capitalize() for word in policy.split("_"))
    if iskeyword(class_name) or class_name in _IMPORTED:
        raise ConfigurationError(f"{name!r} makes a class {class_name}, which is there already; choose another name")
    return {
        "policy": policy,
        "module": module,
        "distribution": f"schedloom-{policy.replace('_', '-')}",
        "class_name": class_name,
        "schedloom": version("schedloom"),
    }


def write_package(folder: Path, names: Mapping[str, str]) -> None:
    """Raises ConfigurationError when a file is there already, or one cannot be written."""
    templates = resources.files("schedloom.commands") / "templates"
    files = {folder / Template(target).substitute(names): source for target, source in _TEMPLATES.items()}
    for path in files:
        if path.exists():
            raise ConfigurationError(f"{path} is already there; choose another name or --directory")
    try:
        for path, source in files.items():
            content = (templates / source).read_text(encoding="utf-8") if source else ""
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(Template(content).substitute(names))
    except OSError as error:
        raise ConfigurationError(f"{error.filename} cannot be written: {error.strerror}") from error
