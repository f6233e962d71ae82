"""What ``pytest --pyargs schedloom.conformance --subject NAME`` collects."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schedloom.conformance import report, suite
from schedloom.conformance.plugin import order_of
from schedloom.conformance.results import RunResult
from schedloom.conformance.verdicts import Verdict


@pytest.fixture(scope="module")
def order(request: pytest.FixtureRequest) -> suite.Order:
    return order_of(request.config)


@pytest.fixture(scope="module")
def result(request: pytest.FixtureRequest, order: suite.Order) -> Iterator[RunResult]:
    """Collects what the tests find, and writes the report when one is asked for."""
    began = time.monotonic()
    collected = suite.empty_result(order)
    yield collected
    collected.seconds = time.monotonic() - began
    if any(found.tier == "T2" for found in collected.cells):
        suite.count_coverage(order, collected)
    if path := request.config.getoption("--conformance-report"):
        report.write(collected, Path(path))


def test_composition(order: suite.Order, result: RunResult) -> None:
    if "T0" not in order.tiers:
        pytest.skip("T0 was not asked for")
    found = suite.run(replace(order, tiers=("T0",)))
    result.composed, result.composition, result.refusals = found.composed, found.composition, found.refusals
    assert not found.composition, "\n".join(violation.message for violation in found.composition)


def test_case(tier: str, case: Any, order: suite.Order, result: RunResult) -> None:
    found = suite.examine_case(tier, case, order)
    result.cells.append(found)
    broken = [f"{violation.invariant}: {violation.message}" for violation in found.violations]
    assert found.verdict is not Verdict.FAILED, "; ".join(broken)
    if found.verdict is Verdict.REFUSED:
        pytest.skip(f"refused: {found.missing}")
    assert found.verdict is Verdict.PASSED, f"inconclusive; never happened: {', '.join(found.missing)}"


def test_known_bad_subject(mutant: str, result: RunResult) -> None:
    found = suite.hunt_here(mutant)
    result.mutants.append(found)
    assert found.killed, f"nobody accused it of breaking {found.dies_on}"
