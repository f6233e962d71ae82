"""X1, C5: every row of the page on the engine side's promises names tests, or invariants, that exist."""

from __future__ import annotations

import re
from pathlib import Path

from schedloom.conformance.invariants import INVARIANTS

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "engine-promises.md").read_text(encoding="utf-8")
ROWS = [row for row in PAGE.splitlines() if row.startswith("| ") and not row.startswith(("| promise ", "| observed "))]


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGE)
    assert len(named) > 80
    assert [each for each in named if f"def {each[1]}(" not in (TESTS / each[0]).read_text(encoding="utf-8")] == []


def test_every_invariant_that_is_named_exists() -> None:
    named = set(re.findall(r"`([A-Z]+-\d)`", PAGE))
    assert named
    assert named <= INVARIANTS.keys()


def test_every_promise_is_shown_by_something() -> None:
    assert [row for row in ROWS if not re.search(r"::test_|`[A-Z]+-\d`", row)] == []
