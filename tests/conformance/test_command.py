"""The command: what it prints, writes and exits with."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from typer.testing import CliRunner

from schedloom.conformance.cells import Cell, legal_cells
from schedloom.conformance.command import app
from schedloom.conformance.invariants import INVARIANTS
from schedloom.conformance.laboratory import Laboratory
from schedloom.conformance.pure.trial import Model
from schedloom.conformance.results import cell_id
from schedloom.router.laboratory import SimulatedRouter

CELL = next(cell for cell in legal_cells([("append_prefill",)]) if cell.role == "consumer" and cell.prefix_caching)


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


@pytest.mark.parametrize("name", INVARIANTS)
def test_every_invariant_is_explained(name: str) -> None:
    code, output = invoke("explain", name)
    assert code == 0
    assert name in output


def test_a_cell_and_a_known_bad_subject_are_explained() -> None:
    assert "append_prefill" in invoke("explain", cell_id(CELL))[1]
    assert "Breaks KV-2" in invoke("explain", "LeaksTailBlock")[1]


def test_a_cell_that_another_room_brings_is_explained() -> None:
    case = SimulatedRouter(("session_owner",))
    code, output = invoke("explain", cell_id(case))
    assert code == 0
    assert case.label() in output and "A cell of R1." in output


def test_every_cell_of_a_report_is_explained(tmp_path: Path) -> None:
    report = tmp_path / "report.yaml"
    invoke("run", "--tier", "T1", "--cell", cell_id(Model(("append_prefill",))), "--report", str(report))
    (found,) = yaml.safe_load(report.read_text())["results"]
    code, output = invoke("explain", found["id"])
    assert code == 0
    assert found["label"] in output and "A cell of T1." in output


def test_nobody_explains_what_is_not_there() -> None:
    assert invoke("explain", "KV-99")[0] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("--subject", "nobody"),
        ("--subject", "balance", "--subject", "recompute"),
        ("--tier", "T9"),
        ("--profile", "huge"),
        ("--cell", "00000000"),
        ("--report", "a.txt"),
        ("--report", "/nowhere/x.yaml"),
        ("--json", "/nowhere/x.json"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_sentence(arguments: tuple[str, ...]) -> None:
    code, output = invoke("run", *arguments)
    assert code == 2
    told = [line for line in output.splitlines() if line and not line.startswith("schedloom: running; ")]
    assert len(told) == 1 and told[0].startswith("schedloom: ")


def test_composition_alone_needs_no_engine(tmp_path: Path) -> None:
    code, output = invoke("run", "--tier", "T0", "--json", str(tmp_path / "numbers.json"))
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert code == 0
    assert numbers["verdict"] == "passed"
    assert numbers["composed"] > numbers["cells"]["refused"] > 0
    assert f"{numbers['composed']:,} compositions examined" in output
    assert "known-bad" not in output and "steps" not in output


def test_one_cell_gives_all_reports(laboratory: Laboratory, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("report.yaml", "report.html", "report.xml")]
    reports = [argument for path in paths for argument in ("--report", str(path))]
    code, output = invoke("run", "--tier", "T2", "--cell", cell_id(CELL), *reports)
    assert code == 0, output
    document = yaml.safe_load(paths[0].read_text())
    assert document["verdict"] == "passed"
    assert document["results"][0]["label"] == CELL.label()
    assert document["results"][0]["events"]["rejected"]
    assert CELL.label() in paths[1].read_text()
    suite = ElementTree.parse(paths[2]).getroot()
    assert {case.get("name") for case in suite.iter("testcase")} >= {"TOK-1", "REJ-1"}


def test_a_spent_budget_is_not_a_pass(laboratory: Laboratory) -> None:
    code, output = invoke("run", "--tier", "mutants", "--budget", "0")
    assert code == 3 and "the budget was spent before all was tried" in output


def test_a_script_is_done_again(laboratory: Laboratory, tmp_path: Path) -> None:
    path = tmp_path / "script.yaml"
    acts = [{"act": "arrive", "number": 1, "fresh": 9, "max_tokens": 5}, {"act": "drain"}]
    path.write_text(yaml.safe_dump({"cell": Cell().to_plain(), "acts": acts}))
    code, output = invoke("run", "--replay", str(path))
    assert code == 0
    assert "nothing broke" in output
