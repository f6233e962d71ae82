"""C5: every fault that the suite has found is tried again, by its name, on the schedule that showed it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from schedloom.conformance.cells import Cell
from schedloom.conformance.laboratory import Laboratory
from schedloom.conformance.script import from_plain
from schedloom.conformance.trial import replay

FOUND: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted((Path(__file__).parent / "pinned").glob("*.yaml"))
}


@pytest.mark.parametrize("name", FOUND)
def test_it_does_not_come_back(laboratory: Laboratory, name: str) -> None:
    acts = [from_plain(act) for act in FOUND[name]["acts"]]
    trial = replay(laboratory, Cell.from_plain(FOUND[name]["cell"]), acts)
    assert not trial.violations, f"{trial.violations}: {FOUND[name]['found']}"
