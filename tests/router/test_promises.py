from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PROMISES = HERE.parents[1] / "docs" / "router" / "promises.md"


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PROMISES.read_text(encoding="utf-8"))
    assert len(named) > 50
    missing = [
        f"{file}::{test}" for file, test in named if f"def {test}(" not in (HERE / file).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_every_promise_names_a_test() -> None:
    rows = [row for row in PROMISES.read_text(encoding="utf-8").splitlines() if row.startswith("| ")]
    unproved = [row for row in rows if "::" not in row and not row.startswith("| promise ")]
    assert unproved == []
