"""C5, X6, A5, A8: cells of T3 pass on real engines, and known-bad subjects fail through the tokens that they change."""

from dataclasses import replace

import pytest

from schedloom.conformance import tiers
from schedloom.conformance.results import CellResult
from schedloom.conformance.verdicts import Verdict
from schedloom.demo.tier import RealEngine

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

SAVING = ("append_prefill", "offload_restore")
WHOLE = RealEngine((*SAVING, "recompute", "kv_lease", "tpot_guard"), "v2", asynchronous=True, connector="both")
BROKEN = "tests.engines.faulty:"

deep = pytest.mark.deep


def examine(case: RealEngine) -> CellResult:
    return tiers.examine(case, "T3", "core", 0)


@pytest.mark.parametrize(
    "case",
    [RealEngine(SAVING, connector="both"), pytest.param(WHOLE, marks=deep), pytest.param(RealEngine(), marks=deep)],
    ids=RealEngine.label,
)
def test_a_cell_passes(case: RealEngine) -> None:
    found = examine(case)
    assert found.verdict is Verdict.PASSED, (found.violations, found.missing)
    assert found.steps > 20
    assert found.events["log-probabilities compared"] >= 4


RESTORING = RealEngine(("offload_restore",), connector="offload", fault=BROKEN + "restores_one_block_too_few")
RELEASING = RealEngine(("short_request_first",), fault=BROKEN + "releases_a_block_early")


@pytest.mark.parametrize(
    "case",
    [
        RESTORING,
        pytest.param(replace(RESTORING, runner="v2"), marks=deep),
        pytest.param(RELEASING, marks=deep),
        pytest.param(replace(RELEASING, runner="v2"), marks=deep),
    ],
    ids=lambda case: f"{case.fault.removeprefix(BROKEN)}-{case.runner}",
)
def test_a_known_bad_subject_changes_tokens(case: RealEngine) -> None:
    found = examine(case)
    assert found.verdict is Verdict.FAILED
    accused = [violation.message for violation in found.violations if violation.invariant == "TOK-1"]
    assert any(" instead of [" in message for message in accused), found.violations


@pytest.mark.deep
def test_a_cell_that_never_met_its_scenario_is_no_pass() -> None:
    found = examine(RealEngine(("offload_restore",), connector="offload", fault=BROKEN + "never_restores"))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.missing == ["preempt_offload RESTORES"]
