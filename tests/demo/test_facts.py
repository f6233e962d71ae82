"""The demo's own judgement: a wrong answer or a broken promise is told, and ends in a status that is not 0."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schedloom.cli import app
from schedloom.demo import command, counters, scenario
from schedloom.demo.client import Answer
from schedloom.demo.conversation import Session
from schedloom.demo.counters import PromptTokens
from schedloom.demo.facts import Facts, Turn

GOOD = Turn("A", 2, "append", "append", 100, 60, 32, 0, 5.0, True)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"exact": False}, "the answer differs"),
        ({"route": "fallback"}, "went by 'fallback', not 'append'"),
        ({"computed_on_prefiller": 7}, "the Prefiller computed for an append"),
    ],
)
def test_what_is_wrong_is_told(change: dict[str, Any], complaint: str) -> None:
    facts = Facts("v1", [GOOD, replace(GOOD, **change)])
    (told,) = facts.complaints
    assert complaint in told
    assert facts.exact is change.get("exact", True)


def test_nothing_is_told_when_nothing_is_wrong() -> None:
    facts = Facts("v1", [GOOD])
    assert (facts.complaints, facts.exact, facts.routes) == ([], True, {"pd": 0, "append": 1, "fallback": 0})


@pytest.mark.parametrize(("change", "status"), [({}, 0), ({"exact": False}, 1), ({"route": "pd"}, 1)])
def test_the_exit_status_says_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, Any], status: int
) -> None:
    monkeypatch.setattr(command, "_run", lambda *arguments: Facts("v1", [replace(GOOD, **change)]))
    monkeypatch.setattr(command, "find_spec", lambda name: object())
    ran = CliRunner().invoke(app, ["demo", "--logs", str(tmp_path), "--json", str(tmp_path / "facts.json")])
    assert ran.exit_code == status, ran.output
    assert (tmp_path / "facts.json").exists()


def test_a_file_that_cannot_be_written_is_told_before_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: object())
    ran = CliRunner().invoke(app, ["demo", "--json", str(tmp_path / "missing" / "facts.json")])
    assert ran.exit_code == 2
    assert ran.stderr.startswith("schedloom: --json: there is no folder")


class FakeClient:
    """Answers every turn with the same token ids."""

    def __init__(self, *token_ids: int) -> None:
        self.answer = Answer("text", list(token_ids), 100, 0.005, "append")

    def ask(self, session: Session) -> Answer:
        return self.answer

    def stream(self, *arguments: Any) -> Answer:
        return self.answer


@pytest.mark.parametrize(("undisturbed", "exact"), [((1, 2, 3), True), ((1, 2, 4), False), ((1, 2), False)])
def test_an_answer_is_held_against_the_undisturbed_engines(
    monkeypatch: pytest.MonkeyPatch, undisturbed: tuple[int, ...], exact: bool
) -> None:
    reads = iter([PromptTokens(5, 5, 5), PromptTokens(1, 1, 1), PromptTokens(5, 5, 5)])
    monkeypatch.setattr(counters, "read", lambda url: next(reads))
    monkeypatch.setattr(counters, "read_after", lambda url, before, tokens: PromptTokens(33, 61, 1))
    engine: Any = type("Engine", (), {"url": ""})
    clients: list[Any] = [FakeClient(1, 2, 3), FakeClient(*undisturbed), FakeClient()]
    system = scenario.System(engine, engine, *clients)
    assert scenario.take_turn(system, Session.opened("A", "header"), 2, "append") == replace(GOOD, exact=exact)
