from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = (ROOT / "docs" / "router" / "promises.md").read_text(encoding="utf-8")
ROWS = [row for row in PAGE.splitlines() if row.startswith("| ")]
HEADS = ("| promise ", "| row ", "| report ")
WITHOUT = ("*not the router's*",)


def file_of(name: str) -> Path:
    return (ROOT if "/" in name else HERE) / name


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`((?:tests/\S+/)?test_\w+\.py)::(test_\w+)`", PAGE)
    assert len(named) > 200 and len(named) == PAGE.count("::test_")
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not re.search(rf"def {test}\(", file_of(file).read_text(encoding="utf-8"))
    ]
    assert missing == []


def test_every_promise_names_a_test_or_says_that_it_has_none() -> None:
    unproved = [row for row in ROWS if "::" not in row and not row.startswith(HEADS)]
    assert [row for row in unproved if not any(word in row for word in WITHOUT)] == []
    assert len(unproved) <= len(WITHOUT)


@pytest.mark.parametrize(("kind", "count"), [("R", 16), ("SEC-", 16)])
def test_every_row_that_was_asked_is_there_once(kind: str, count: int) -> None:
    asked = [row.split("|")[1].strip() for row in ROWS if re.match(rf"\| {kind}\d+ ", row)]
    assert asked == [f"{kind}{number}" for number in range(1, count + 1)]
