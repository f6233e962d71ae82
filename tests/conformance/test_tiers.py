"""C5: tiers that other rooms bring are played seed by seed, and what they find has the id of what it breaks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from schedloom.conformance import composition, coverage, subjects, suite, tiers
from schedloom.conformance.mutants import MUTANTS
from schedloom.conformance.report import document, junit, page
from schedloom.conformance.results import NEVER_REJECTED, CellResult, RunResult
from schedloom.conformance.verdicts import Verdict
from schedloom.core.errors import ConfigurationError
from schedloom.router.laboratory import SimulatedRouter, SimulationTier, SocketTier
from schedloom.router.laboratory.upstream import SimulatedUpstream


class Scripted:
    """A tier that plays what it is told, seed after seed."""

    side = "router"
    invariants = ("OUT-1", "KV-2")

    def __init__(self, *played: Mapping[str, Any]) -> None:
        self.played = played

    def cases(self, sets: Sequence[tuple[str, ...]], profile: str) -> list[SimulatedRouter]:
        return [SimulatedRouter(policies) for policies in sets]

    def seeds(self, profile: str) -> int:
        return len(self.played)

    def needs(self, case: Any) -> list[str]:
        return ["answered"]

    def play(self, case: Any, seed: int) -> Mapping[str, Any]:
        if not (played := self.played[seed % len(self.played)]):
            raise ConfigurationError("not here")
        return played


def played(*violations: tuple[str, str], **events: int) -> dict[str, Any]:
    return {"steps": 3, "events": events, "violations": list(violations)}


@pytest.mark.parametrize(
    ("script", "verdict"),
    [
        ([played(), played(answered=1)], Verdict.PASSED),
        ([played(), played()], Verdict.INCONCLUSIVE),
        ([played(), played(), played(), played(answered=1)], Verdict.PASSED),
        ([played(("KV-2", "left")), played(answered=1)], Verdict.FAILED),
        ([{}], Verdict.REFUSED),
    ],
)
def test_what_was_played_becomes_a_verdict(
    monkeypatch: pytest.MonkeyPatch, script: list[Any], verdict: Verdict
) -> None:
    monkeypatch.setattr(tiers, "load", lambda name: Scripted(*script))
    found = tiers.examine(SimulatedRouter(), "R1", "core", 0)
    assert found.verdict is verdict
    if verdict is Verdict.FAILED:
        assert found.failing_seed == 0 and found.invariants == {"OUT-1": Verdict.PASSED, "KV-2": Verdict.FAILED}


def test_a_router_whose_engines_forget_early_is_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    case, tier = SimulatedRouter(("session_owner",)), SimulationTier()
    assert not any(tier.play(case, seed)["violations"] for seed in range(8))
    prefill = SimulatedUpstream._prefill

    def forgetful(self: Any, engine: Any, request_id: str, tokens: list[int]) -> Any:
        response = prefill(self, engine, request_id, tokens)
        engine.leases[request_id] = self._now() - 1
        return response

    monkeypatch.setattr(SimulatedUpstream, "_prefill", forgetful)
    found = [violation for seed in range(8) for violation in tier.play(case, seed)["violations"]]
    assert "KV-4" in {invariant for invariant, _ in found}


def test_on_sockets_it_holds_what_it_promises() -> None:
    case, tier = SimulatedRouter(("session_owner",), "on sockets"), SocketTier()
    events: Counter[str] = Counter()
    for seed in range(8):
        found = tier.play(case, seed)
        assert found["violations"] == [], f"seed {seed}"
        events.update(found["events"])
    assert all(events[event] for event in tier.needs(case))


@dataclass(frozen=True)
class Chosen(SimulatedRouter):
    axes: tuple[int, ...] = ()

    def label(self) -> str:
        return f"{self.policies} {self.axes}"

    def engine_axes(self) -> dict[str, int]:
        return dict(zip("abcd", self.axes, strict=True))


class Covered(Scripted):
    """Four axes of three values each, of which every two are to be combined."""

    side = "engine"
    strength = 2

    def cases(self, sets: Sequence[tuple[str, ...]], profile: str) -> list[SimulatedRouter]:
        return [Chosen((), axes=axes) for axes in product(range(3), repeat=4)]


def run_only(monkeypatch: pytest.MonkeyPatch, tier: Scripted, **more: Any) -> RunResult:
    """R1 alone, played by ``tier``; T3 cannot be run."""

    def load(name: str) -> Scripted:
        if name == "T3":
            raise ConfigurationError("it needs engines")
        return tier

    monkeypatch.setattr(tiers, "load", load)
    monkeypatch.setattr(composition, "policy_sets", lambda subject: [()])
    return suite.run(suite.Order(**{"tiers": ("R1",), **more}))


def test_a_tier_with_a_strength_is_covered_and_not_played_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_only(monkeypatch, Covered(played(answered=1)))
    assert result.coverage["R1"] == coverage.Coverage(strength=2, covered=54, legal=54)
    assert 9 <= len(result.cells) < 27
    assert result.verdict is Verdict.PASSED


def test_what_was_not_covered_in_time_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_only(monkeypatch, Covered(played(answered=1)), budget=0)
    assert result.coverage["R1"].covered == 0
    assert result.verdict is Verdict.INCONCLUSIVE


def test_a_tier_that_cannot_be_run_here_is_said_and_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_only(monkeypatch, Covered(played(answered=1)), tiers=("R1", "T3"))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert document.as_plain(result)["unavailable"] == {"T3": "it needs engines"}
    assert "not run: it needs engines" in junit.render(result)


def test_a_cell_that_failed_is_played_again_from_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_only(monkeypatch, Covered(played(("KV-2", "left"))))
    failed = result.cells[0]
    assert document.replay_document(failed) == {"tier": "R1", "cell": failed.id, "seed": 0}
    again = run_only(monkeypatch, Covered(played(("KV-2", "left"))), cell=failed.id)
    assert [found.cell for found in again.cells] == [failed.cell]
    assert again.verdict is Verdict.FAILED


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("TriesAnotherDecoder", "an attempt away from the owner"),
        ("TriesWhereNobodyIsTurnedAway", "turns nobody away"),
        ("KeepsSessionsWhateverTheLoad", "requests ahead"),
        ("SendsWholeRequestsAnywhere", "a whole request away from the owner"),
        ("GuessesForFirstTurns", "an attempt away from the owner"),
        ("GuessesWhereNobodyIsTurnedAway", "turns nobody away"),
    ],
)
def test_a_routing_policy_that_lacks_a_guard_is_found_by_what_engines_are_sent(name: str, words: str) -> None:
    mutant = MUTANTS[name]
    found = tiers.hunt(mutant, suite.TOWN_SEEDS)
    assert found is not None
    tier: Any = tiers.load(mutant.tier)
    (case,) = tier.cases([mutant.cell.policies], "core")
    played = [tier.play(case, seed, subjects.with_faults((mutant.fault,))) for seed in range(found[0], found[0] + 12)]
    assert {invariant for run in played for invariant, _ in run["violations"]} == {"OWN-1"}
    assert any(words in message for run in played for _, message in run["violations"])


def test_known_bad_subjects_of_a_tier_are_tried_with_those_of_engines() -> None:
    assert suite.hunt_here("TriesAnotherDecoder").killed


def test_every_report_says_what_can_be_done_about_what_never_happened() -> None:
    found = CellResult(SimulatedRouter(()), Verdict.INCONCLUSIVE, invariants={"REJ-1": Verdict.INCONCLUSIVE})
    found.missing = ["rejected"]
    result = RunResult(None, "core", ["R1"], 0, {}, cells=[found])
    assert document.as_plain(result)["results"][0]["advice"] == [NEVER_REJECTED]
    assert NEVER_REJECTED in junit.render(result) and NEVER_REJECTED in page.render(result)
