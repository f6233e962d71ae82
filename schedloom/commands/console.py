"""How the commands print."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH_OF_A_PIPE = 200


def console() -> Console:
    """Standard output; wide where nobody looks, so that lines can be searched."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE)


def table(*columns: str, rows: Iterable[tuple[str, ...]]) -> Table:
    """A plain table under bold column names, the last column folding."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold", no_wrap=column != columns[-1])
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def complain(*sentences: str) -> NoReturn:
    """One line on standard error for each sentence, then the end with status 1."""
    say(*sentences)
    raise typer.Exit(1)


def say(*sentences: str) -> None:
    """One line on standard error for each sentence."""
    for sentence in sentences:
        typer.echo(f"schedloom: {sentence}", err=True)
