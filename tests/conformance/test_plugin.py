"""C5: a third party's pytest runs every tier that its policy has a part in."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from schedloom.conformance import suite, test_conformance
from schedloom.conformance.plugin import TIERS, pytest_generate_tests


@pytest.mark.parametrize(("subject", "tiers"), [("session_owner", {"R1"}), ("recompute", {"T1"})])
def test_a_subject_has_cases_where_somebody_calls_it(subject: str, tiers: set[str]) -> None:
    wanted = tuple(tier for tier in TIERS if tier != "T2")
    assert {tier for tier, _ in suite.cases(suite.Order(subject=subject, tiers=wanted))} == tiers


def test_a_subject_is_tried_in_the_tier_that_was_asked_for() -> None:
    asked = ["--subject", "recompute", "--tier", "T1", "-k", "T1 and not +"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "schedloom.conformance"]
    ran = subprocess.run([*command, *asked], check=False, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and "1 passed" in ran.stdout, ran.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [({"--tier": ["T9"]}, "there is no tier 'T9'"), ({"--subject": "nobody"}, "there is no policy 'nobody'")],
)
def test_what_cannot_be_run_is_said_in_a_sentence(options: dict[str, Any], said: str) -> None:
    given = {"--subject": None, "--profile": "core", "--tier": None, "--conformance-seed": 0} | options
    asked: Any = SimpleNamespace(
        module=test_conformance, fixturenames=["tier", "case"], config=SimpleNamespace(getoption=given.get)
    )
    with pytest.raises(pytest.UsageError, match=said):
        pytest_generate_tests(asked)
