"""C5: which cells T3 has, what each must meet, and what becomes of what its process says. No engine is started here."""

import json
import subprocess
from typing import Any

import pytest

from schedloom.core.errors import ConfigurationError
from schedloom.demo import tier
from schedloom.demo.tier import EngineTier, RealEngine

CASE = RealEngine(("append_prefill", "offload_restore"), connector="both", chunked=True)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "_installed", lambda name: True)


def ran(monkeypatch: pytest.MonkeyPatch, status: int = 0, told: str = "", errors: str = "") -> list[list[str]]:
    """Have the cell's process be a fake that ends with ``status``; the commands that were run."""
    commands: list[list[str]] = []

    def run(command: list[str], **keywords: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, status, told, errors)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(tier, "cached_model", lambda: "model")
    return commands


def test_a_policy_is_only_tried_where_its_needs_are_met() -> None:
    cases = EngineTier().cases([(), ("append_prefill",), ("append_prefill", "offload_restore")], "core")
    assert len([case for case in cases if not case.policies]) == 2 * 2 * 4 * 2 * 2
    assert {case.prefix_caching for case in cases if case.policies} == {True}
    assert {case.connector for case in cases if len(case.policies) == 1} == {"offload", "pull", "both"}
    assert {case.connector for case in cases if len(case.policies) == 2} == {"offload", "both"}


def test_labels_tell_cells_apart() -> None:
    cases = EngineTier().cases([(), ("kv_lease",)], "core")
    assert len({case.label() for case in cases}) == len(cases)
    assert RealEngine(fault="a:b").label() != RealEngine().label()


def test_a_cell_must_meet_what_its_axes_and_policies_are_there_for() -> None:
    needs = EngineTier().needs(CASE)
    assert {"preempted", "resumed", "log-probabilities compared", "prefix hit", "pulled", "chunk"} <= set(needs)
    assert {"preempt_offload RESTORES", "append_prefill ADMIT", "append_prefill asked"} <= set(needs)
    assert "recompute RESUME" in EngineTier().needs(RealEngine(("recompute",), connector="pull"))
    assert not {"prefix hit", "pulled", "chunk"} & set(EngineTier().needs(RealEngine(prefix_caching=False)))


def test_the_process_is_told_the_cell_and_what_it_says_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"steps": 7, "events": {"token": 3}, "violations": []}
    commands = ran(monkeypatch, told="noise\n" + json.dumps({"found": seen}))
    assert EngineTier().play(CASE, 5) == seen
    (command,) = commands
    told = json.loads(command[-1])
    assert (told["seed"], told["connector"], told["chunked"]) == (5, "both", True)
    assert [choice["name"] for choice in told["settings"]] == ["append_prefill", "offload_restore"]
    assert told["settings"][1]["min_saved_tokens"] == 4
    assert told["needs"] == EngineTier().needs(CASE)


def test_a_refusal_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ran(monkeypatch, told=json.dumps({"found": {"refused": "not here"}}))
    with pytest.raises(ConfigurationError, match="not here"):
        EngineTier().play(CASE, 0)


def test_a_process_that_dies_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    ran(monkeypatch, status=-11, errors="first\nlast words")
    assert EngineTier().play(CASE, 0)["violations"] == [("LIVE-3", "its process ended with status -11: last words")]


def test_a_process_that_hangs_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    ran(monkeypatch)

    def hang(command: list[str], **keywords: Any) -> None:
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(subprocess, "run", hang)
    ((invariant, _),) = EngineTier().play(CASE, 0)["violations"]
    assert invariant == "LIVE-1"


def test_without_engines_for_cpus_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "_installed", lambda name: name != "nixl")
    with pytest.raises(ConfigurationError, match="nixl is not installed"):
        EngineTier()
