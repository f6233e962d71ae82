"""The one command, ``schedloom``: the only place that knows every room."""

from __future__ import annotations

import typer

from schedloom.demo.command import demo
from schedloom.router.commands import route

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.command()(demo)
app.command()(route)


def main() -> None:
    app(prog_name="schedloom")
