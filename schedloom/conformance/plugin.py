"""Options for ``pytest --pyargs schedloom.conformance``. Loaded by every pytest here, so it imports nothing early."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from schedloom.conformance.suite import Order

TIERS = ("T0", "T1", "T2", "R1")
"""What is run when no tier is named: known-bad subjects say nothing of the subject, and real engines take long."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("schedloom", "schedloom conformance")
    group.addoption("--subject", default=None, help="policy to try, alone and with the others; default: every policy")
    group.addoption("--profile", default="core", choices=["core", "full"], help="how much of the matrix is tried")
    group.addoption("--tier", action="append", help=f"tier to run, several if wanted; default: {', '.join(TIERS)}")
    group.addoption("--conformance-seed", default=0, type=int, help="first seed of every cell")
    group.addoption("--conformance-report", default=None, help="write a report: .yaml, .html or .xml")


def order_of(config: pytest.Config) -> Order:
    """What the options ask for. Raises UsageError when there is nothing like it."""
    import pytest

    from schedloom.conformance import suite, tiers

    option = config.getoption
    wanted = tuple(option("--tier") or TIERS)
    known = dict.fromkeys([*suite.TIERS, *tiers.names()])
    if unknown := [name for name in wanted if name not in known]:
        raise pytest.UsageError(f"there is no tier {unknown[0]!r}; there are {', '.join(known)}")
    return suite.Order(option("--subject"), option("--profile"), wanted, option("--conformance-seed"))


def pytest_generate_tests(metafunc: Any) -> None:
    """Parametrize the suite's own tests over the cases that the options ask for; nobody else's tests are touched.

    Raises UsageError when there are none, or a tier cannot be run here.
    """
    if metafunc.module.__name__ != "schedloom.conformance.test_conformance":
        return
    import pytest

    from schedloom.conformance import suite
    from schedloom.core.errors import ConfigurationError

    try:
        cases = suite.cases(order_of(metafunc.config))
    except ConfigurationError as error:
        raise pytest.UsageError(str(error)) from error
    if {"tier", "case"} <= set(metafunc.fixturenames):
        tried = [(tier, case) for tier, case in cases if tier != "mutants"]
        labels = [f"{tier} {case.label()}".replace(", ", " ") for tier, case in tried]
        metafunc.parametrize(("tier", "case"), tried, ids=labels)
    if "mutant" in metafunc.fixturenames:
        metafunc.parametrize("mutant", [name for tier, name in cases if tier == "mutants"])
