"""Options for ``pytest --pyargs schedloom.conformance``. Loaded by every pytest here, so it imports nothing early."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("schedloom", "schedloom conformance")
    group.addoption("--subject", default=None, help="policy to try, alone and with the others; default: every policy")
    group.addoption("--profile", default="core", choices=["core", "full"], help="how much of the matrix is tried")
    group.addoption("--conformance-seed", default=0, type=int, help="first seed of every cell")
    group.addoption("--conformance-report", default=None, help="write a report: .yaml, .html or .xml")


def pytest_generate_tests(metafunc: Any) -> None:
    """Parametrize the suite's own test over the cells that the options ask for; nobody else's tests are touched."""
    if metafunc.module.__name__ != "schedloom.conformance.test_conformance" or "cell" not in metafunc.fixturenames:
        return
    from schedloom.conformance import composition, suite

    config = metafunc.config
    order = suite.Order(subject=config.getoption("--subject"), profile=config.getoption("--profile"))
    accepted = composition.examine(suite.cells_of(order)).accepted
    cells, _ = suite.chosen(order, accepted)
    metafunc.parametrize("cell", cells, ids=[cell.label().replace(", ", " ") for cell in cells])
