"""The one command, ``schedloom``: the only place that knows every room."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from schedloom import __version__
from schedloom.commands.config import config
from schedloom.commands.doctor import doctor
from schedloom.commands.explain import explain
from schedloom.commands.new_policy import new_policy
from schedloom.commands.policies import policies
from schedloom.conformance.command import app as conformance
from schedloom.core.errors import ConfigurationError
from schedloom.demo.command import demo
from schedloom.router.commands import route

HELP = "Scheduling policies for disaggregated LLM serving: route requests, compose, explain and check policies."


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"schedloom {__version__}")
        raise typer.Exit


app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, help=HELP
)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for command in (route, policies, explain, doctor, new_policy, demo):
    app.command()(command)
app.add_typer(config, name="config")
app.add_typer(conformance, name="conformance")


def main() -> None:
    """What cannot be used as it stands ends the command with a sentence for each complaint and its status."""
    try:
        app(prog_name="schedloom")
    except ConfigurationError as error:
        for sentence in error.sentences:
            print(f"schedloom: {sentence}", file=sys.stderr)
        sys.exit(error.status)
