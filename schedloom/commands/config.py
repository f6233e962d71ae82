"""``schedloom config``."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from schedloom.commands.console import complain, console
from schedloom.commands.documents import read_document
from schedloom.commands.examination import examine
from schedloom.commands.schema import json_schema
from schedloom.core.registry import Registry

config = typer.Typer(no_args_is_help=True, help="Check configuration files, and print what they may hold.")

ConfigurationFile = Annotated[
    Path, typer.Argument(help="YAML or JSON: router settings, vLLM's own file, or our section of it.")
]


class Kind(str, Enum):
    """Whose configuration."""

    engine = "engine"
    router = "router"


@config.command()
def validate(file: ConfigurationFile) -> None:
    """Check one configuration file as strictly as a start would.

    A key ``kind`` with the value engine or router says what the file is for; without one its keys decide. Exits with
    status 1, and one sentence for each complaint, when something does not fit. What only a start can know, as it is
    not in the file, is said too.
    """
    document = read_document(file)
    found = examine(document)
    if found.complaints:
        complain(*(f"{file}: {complaint}" for complaint in found.complaints))
    names = ", ".join(policy.name for policy in found.policies) or "none"
    console().print(f"{file}: fits the {document.side}; policies on: {names}", soft_wrap=True)
    for note in found.notes:
        console().print(f"{file}: {note}", soft_wrap=True)


@config.command()
def schema(kind: Annotated[Kind, typer.Argument(help="Whose configuration: engine or router.")] = Kind.engine) -> None:
    """Print a JSON Schema, with the settings of every installed policy, for editors and other checkers.

    The engine's describes the value of scheduler_config in --additional-config.
    """
    typer.echo(json.dumps(json_schema(kind.value, Registry()), indent=2))
