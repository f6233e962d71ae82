"""What ``pytest --pyargs schedloom.conformance --subject NAME`` collects."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedloom.conformance import composition, report, suite
from schedloom.conformance.cells import Cell
from schedloom.conformance.results import RunResult
from schedloom.conformance.verdicts import Verdict


@pytest.fixture(scope="module")
def result(request: pytest.FixtureRequest) -> Iterator[RunResult]:
    """Collects what the tests find, and writes the report when one is asked for."""
    option = request.config.getoption
    order = suite.Order(option("--subject"), option("--profile"), ("T0", "T2"), option("--conformance-seed"))
    began = time.monotonic()
    collected = suite.empty_result(order)
    yield collected
    collected.seconds = time.monotonic() - began
    suite.count_coverage(order, collected)
    if option("--conformance-report"):
        report.write(collected, Path(option("--conformance-report")))


def test_composition(request: pytest.FixtureRequest, result: RunResult) -> None:
    found = composition.examine(suite.cells_of(suite.Order(subject=request.config.getoption("--subject"))))
    result.composed = len(found.accepted) + len(found.refused)
    result.composition, result.refusals = found.violations, found.refusals
    assert not found.violations, "\n".join(violation.message for violation in found.violations)


def test_cell(cell: Cell, request: pytest.FixtureRequest, result: RunResult) -> None:
    option = request.config.getoption
    found = suite.examine_here(cell, option("--conformance-seed"), option("--profile"))
    result.cells.append(found)
    broken = [f"{violation.invariant}: {violation.message}" for violation in found.violations]
    assert found.verdict is not Verdict.FAILED, "; ".join(broken)
    if found.verdict is Verdict.REFUSED:
        pytest.skip(f"refused: {found.missing}")
    assert found.verdict is Verdict.PASSED, f"inconclusive; never happened: {', '.join(found.missing)}"
