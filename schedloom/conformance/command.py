"""``schedloom conformance``: run the suite, list what it knows, explain it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from schedloom.conformance.invariants import INVARIANTS
from schedloom.conformance.mutants import MUTANTS
from schedloom.conformance.verdicts import Verdict
from schedloom.core.errors import ConfigurationError

app = typer.Typer(no_args_is_help=True, help="Prove policies, alone and together, on real schedulers.")
console = Console()

EXIT_CODES = {Verdict.PASSED: 0, Verdict.FAILED: 1, Verdict.INCONCLUSIVE: 3, Verdict.REFUSED: 3}
HEARTBEAT_SECONDS = 15.0
_CELL_ID = re.compile("[0-9a-f]{8}")
STYLES = {Verdict.PASSED: "green", Verdict.FAILED: "red", Verdict.INCONCLUSIVE: "yellow", Verdict.REFUSED: "dim"}


@app.command()
def run(
    subject: Annotated[
        list[str] | None, typer.Option(help="A registered policy, one in a run; every policy when left out.")
    ] = None,
    profile: Annotated[str, typer.Option(help="core or full.")] = "core",
    tier: Annotated[list[str] | None, typer.Option(help="T0, T1, T2, T3, R1, R2, mutants; several if wanted.")] = None,
    seed: Annotated[int, typer.Option(help="The first seed of every cell.")] = 0,
    cell: Annotated[str | None, typer.Option(help="Only the cell with this id.")] = None,
    replay: Annotated[Path | None, typer.Option(help="Do a script of a report again, and nothing else.")] = None,
    steps: Annotated[int, typer.Option(help="Go on for so many random steps over all cells.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    budget: Annotated[float | None, typer.Option(help="Stop after so many seconds; inconclusive then.")] = None,
    report: Annotated[list[Path] | None, typer.Option(help="Write a report: .yaml, .html or .xml (JUnit).")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the numbers of the verdict.")] = None,
) -> None:
    """Run the suite. Exit code 0: passed; 1: failed; 2: cannot be run; 3: inconclusive."""
    try:
        if replay is not None:
            raise typer.Exit(_replay(replay))
        _check_files(report or (), json_path)
        result = _run(_only(subject), profile, tuple(tier or ()), seed, cell, steps, workers, budget)
    except ConfigurationError as error:
        raise _cannot_run(error) from error
    from schedloom.conformance import report as reports
    from schedloom.conformance.report import document

    for path in report or ():
        reports.write(result, path)
    if json_path is not None:
        json_path.write_text(json.dumps(document.summary(result), indent=2) + "\n")
    _show(result, report or [])
    raise typer.Exit(EXIT_CODES[result.verdict])


def _cannot_run(error: ConfigurationError) -> typer.Exit:
    for sentence in error.sentences:
        typer.echo(f"schedloom: {sentence}", err=True)
    return typer.Exit(2)


def _only(subjects: list[str] | None) -> str | None:
    if subjects and len(subjects) > 1:
        raise ConfigurationError(
            f"--subject takes one policy in a run, not {' and '.join(subjects)}; run it once for each"
        )
    return subjects[0] if subjects else None


def _check_files(reports: Sequence[Path], json_path: Path | None) -> None:
    """What cannot be written is told before minutes are spent."""
    for path in reports:
        if path.suffix not in (".yaml", ".html", ".xml"):
            raise ConfigurationError(f"--report {path}: end the name with .yaml, .html or .xml (JUnit)")
    for path in (*reports, *filter(None, [json_path])):
        if not path.absolute().parent.is_dir():
            raise ConfigurationError(f"{path} cannot be written: there is no folder {path.absolute().parent}")


@contextmanager
def _heartbeat(reached: dict[str, str]) -> Iterator[None]:
    """A line on standard error now and then, where nobody sees the bars."""
    ended = Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            typer.echo(f"schedloom: running; {', '.join(reached.values()) or 'composing policies'}", err=True)

    if not console.is_terminal:
        Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _run(subject: str | None, profile: str, tiers: tuple[str, ...], *rest: Any) -> Any:
    from schedloom.conformance import suite

    first_seed, cell, steps, workers, budget = rest
    if profile not in suite.PROFILES:
        raise ConfigurationError(f"there is no profile {profile!r}; choose from core, full")
    known = suite.default_tiers("full")
    if unknown := set(tiers) - set(known):
        raise ConfigurationError(f"there is no tier {sorted(unknown)[0]!r}; choose from {', '.join(known)}")
    columns = (TextColumn("{task.description:>20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    reached: dict[str, str] = {}
    with _heartbeat(reached), Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)
            reached[what] = f"{what}: {done} of {total}"

        wanted = tiers or suite.default_tiers(profile)
        order = suite.Order(subject, profile, wanted, first_seed, workers, budget, steps, cell, progress)
        return suite.run(order)


def _show(result: Any, reports: list[Path]) -> None:
    from schedloom.conformance.report.document import reproduce, summary

    for found in result.cells:
        if found.verdict in (Verdict.FAILED, Verdict.INCONCLUSIVE):
            console.print(f"[{STYLES[found.verdict]}]{found.verdict.value}[/] {found.cell.label()}")
            for reason in found.reasons:
                console.print(f"    {reason}", soft_wrap=True)
            console.print(f"    again: {reproduce(found, result.first_seed)}")
    for tier, reason in result.unavailable.items():
        console.print(f"[yellow]not run[/] {tier}: {reason}")
    for violation in result.composition:
        console.print(f"[red]failed[/] {violation.invariant}: {violation.message}")
    for mutant in result.mutants:
        if not mutant.killed:
            console.print(f"[red]not found[/] {mutant.name} breaks {mutant.dies_on}")
    told = "; ".join([*_figures(summary(result), result), *map(str, reports)])
    console.print(f"[bold {STYLES[result.verdict]}]{result.verdict.value}[/]: {told}", soft_wrap=True)


def _figures(facts: dict[str, Any], result: Any) -> Iterator[str]:
    """What a run came to, without what it did not try."""
    if result.out_of_budget:
        yield "the budget was spent before all was tried"
    cells = ", ".join(f"{count} {word}" for word, count in facts["cells"].items() if count)
    if result.composed:
        yield f"{result.composed:,} compositions examined"
    yield f"cells: {cells or 'none'}"
    if result.steps:
        yield f"{result.steps:,} steps"
    if result.mutants:
        yield f"known-bad subjects found: {facts['mutants']['killed']} of {facts['mutants']['total']}"
    yield f"{result.seconds:.0f} s"


def _replay(path: Path) -> int:
    """Takes a file with ``cell`` and ``acts``, or with ``tier``, ``cell`` and ``seed``; or a report: then its first."""
    from schedloom.conformance import suite
    from schedloom.conformance.cells import Cell
    from schedloom.conformance.script import from_plain
    from schedloom.conformance.trial import replay

    document = yaml.safe_load(path.read_text())
    if "acts" not in document:
        scripts = [found["replay"] for found in document.get("results", []) if "replay" in found]
        if not scripts:
            raise ConfigurationError(f"{path} holds no script: nothing in it failed")
        document = scripts[0]
    if "tier" in document:
        return _play_again(**document)
    acts = [from_plain(act) for act in document["acts"]]
    trial = replay(suite.laboratory(), Cell.from_plain(document["cell"]), acts)
    for violation in trial.violations:
        console.print(f"[red]{violation.invariant}[/] in step {violation.step}: {violation.message}")
    if not trial.violations:
        console.print(f"[green]nothing broke[/] in {trial.steps} steps of {len(acts)} acts")
    return 1 if trial.violations else 0


def _play_again(tier: str, cell: str, seed: int) -> int:
    from schedloom.conformance import suite

    result = suite.run(suite.Order(tiers=(tier,), cell=cell, first_seed=seed))
    _show(result, [])
    return EXIT_CODES[result.verdict]


@app.command("list")
def list_everything() -> None:
    """The invariants, and the known-bad subjects that show that they are looked at."""
    table = Table("invariant", "statement", "shown by")
    for invariant in INVARIANTS.values():
        shown = [mutant.name for mutant in MUTANTS.values() if mutant.dies_on == invariant.id]
        table.add_row(invariant.id, invariant.statement, ", ".join(shown))
    console.print(table)


@app.command()
def explain(id: Annotated[str, typer.Argument(help="An invariant, a known-bad subject or a cell.")]) -> None:
    """What an id stands for."""
    for line in _explanation(id):
        console.print(line)


def _explanation(name: str) -> list[str]:
    if name in INVARIANTS:
        invariant = INVARIANTS[name]
        return [
            f"[bold]{invariant.id}[/] {invariant.statement}.",
            f"Found out by: {invariant.oracle}.",
            f"Inconclusive unless in the cell there was: {', '.join(invariant.events)}.",
        ]
    if name in MUTANTS:
        mutant = MUTANTS[name]
        return [f"[bold]{name}[/] {mutant.description}", f"Breaks {mutant.dies_on}, in: {mutant.where}."]
    return _explained_cell(name)


def _explained_cell(name: str) -> list[str]:
    from schedloom.conformance import suite
    from schedloom.conformance.applicability import applicable

    try:
        if not _CELL_ID.fullmatch(name):
            raise ConfigurationError(f"nothing is called {name!r}; see `schedloom conformance list`")
        if (found := suite.case_of(name)) is not None:
            return [f"[bold]{name}[/] {found[1].label()}", f"A cell of {found[0]}."]
        (cell,) = suite.cells_of(suite.Order(cell=name))
    except ConfigurationError as error:
        raise _cannot_run(error) from error
    return [f"[bold]{name}[/] {cell.label()}", f"Tries {', '.join(applicable(cell))}."]
