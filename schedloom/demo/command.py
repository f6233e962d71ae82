"""``schedloom demo``."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from schedloom.demo.engines import EngineFailed, Runner
from schedloom.demo.facts import Facts
from schedloom.demo.model import cached_model
from schedloom.demo.report import print_report, print_turn
from schedloom.demo.scenario import play, running_system
from schedloom.demo.service import ServiceFailed


class RunnerChoice(str, Enum):
    """vLLM's two model runners."""

    v1 = "v1"
    v2 = "v2"


def demo(
    runner: Annotated[RunnerChoice, typer.Option(help="vLLM's model runner.")] = RunnerChoice.v1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the same facts to this file.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Where the logs go; by default a new temporary folder.")] = None,
) -> None:
    """The main job on this machine: a real Prefiller, a real Decoder and the router between them and a client.

    Exits with status 1 when an answer differs from an undisturbed engine's or a promised route did not happen.
    """
    console = Console(highlight=False)
    if find_spec("vllm") is None:
        _fail("the demo needs an engine: run `make demo` in a checkout of schedloom")
    if json_path and not json_path.absolute().parent.is_dir():
        _fail(f"--json: there is no folder {json_path.absolute().parent}", status=2)
    # Ended like Ctrl-C, so that the engines are stopped in order; whatever else ends this process ends them too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "*"  # all that it asks for is on this machine
    folder = logs or Path(tempfile.mkdtemp(prefix="schedloom-demo-"))
    try:
        facts = _run(runner.value, folder, console)
    except (EngineFailed, ServiceFailed) as error:
        _fail(str(error))
    print_report(console, facts)
    console.print(f"logs: {folder}")
    if json_path:
        json_path.write_text(json.dumps(facts.as_json(), indent=1) + "\n")
    if facts.complaints:
        raise typer.Exit(1)


def _run(runner: Runner, logs: Path, console: Console) -> Facts:
    console.print(f"[bold]making a small model and starting three engines[/] (logs in {logs})")
    model = cached_model()

    def say(line: str) -> None:
        console.print(f"[bold]{line}[/]")

    with running_system(runner, model, logs, say) as system:
        return play(system, runner, say, lambda turn: print_turn(console, turn))


def _fail(message: str, status: int = 1) -> NoReturn:
    typer.echo(f"schedloom: {message}", err=True)
    raise typer.Exit(status)
