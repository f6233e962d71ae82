"""The demo's table, for people."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from schedloom.demo.facts import Facts, Turn

_COLOURS = {"pd": "cyan", "append": "green", "fallback": "yellow"}


def print_turn(console: Console, turn: Turn) -> None:
    """One line while the demo works."""
    mark = "[green]exact[/]" if turn.exact else "[red]DIFFERS[/]"
    console.print(
        f"  session {turn.session} turn {turn.turn}: {_route(turn.route)}, {turn.prompt_tokens} prompt tokens, "
        f"TTFT {turn.ttft_ms:.0f} ms, {mark}"
    )


def print_report(console: Console, facts: Facts) -> None:
    """The whole table, the totals, and what is wrong if anything is."""
    console.print(_table(facts))
    console.print(_totals(facts))
    for complaint in facts.complaints:
        console.print(f"[red]{complaint}[/]")


def _table(facts: Facts) -> Table:
    table = Table(title=f"model runner {facts.runner}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("session", "turn", "route"):
        table.add_column(name, no_wrap=True)
    for name in ("prompt", "reused\non D", "computed\non D", "computed\non P", "TTFT\nms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("exact", no_wrap=True)
    for turn in facts.turns:
        table.add_row(*_row(turn))
    return table


def _row(turn: Turn) -> list[str]:
    numbers = (turn.prompt_tokens, turn.reused_tokens, turn.computed_on_decoder, turn.computed_on_prefiller)
    return [
        *(turn.session, str(turn.turn), _route(turn.route)),
        *(f"{number:,}" for number in numbers),
        *(f"{turn.ttft_ms:.0f}", "yes" if turn.exact else "[red]NO[/]"),
    ]


def _route(route: str) -> str:
    return f"[{_COLOURS.get(route, 'red')}]{route or 'unknown'}[/]"


def _totals(facts: Facts) -> str:
    prompt = sum(turn.prompt_tokens for turn in facts.turns)
    on_prefiller = sum(turn.computed_on_prefiller for turn in facts.turns)
    reused = sum(turn.reused_tokens for turn in facts.turns)
    routes = ", ".join(f"{count} {route}" for route, count in facts.routes.items())
    exact = sum(turn.exact for turn in facts.turns)
    return (
        f"{len(facts.turns)} turns: {routes}. {exact} of {len(facts.turns)} exact.\n"
        f"{prompt:,} prompt tokens: {on_prefiller:,} computed on the Prefiller, {reused:,} reused on the Decoder."
    )
