"""The covering array covers, and the count that says so does not come from the same code."""

from collections import defaultdict
from typing import Any

import pytest

from schedloom.conformance.cells import Cell, legal_cells
from schedloom.conformance.composition import kind_of
from schedloom.conformance.coverage import count
from schedloom.conformance.covering import cover
from schedloom.conformance.suite import some_engines

CELLS = list(legal_cells([(), ("append_prefill",)]))
AXES = [cell.axes() for cell in CELLS]
ROWS = [tuple(axes.values()) for axes in AXES]


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_legal_interaction_is_covered(strength: int) -> None:
    chosen = cover(ROWS, strength)
    assert count([AXES[place] for place in chosen], AXES, strength).complete
    assert len(chosen) < len(ROWS) / 4


def test_some_engines_of_a_kind_have_all_that_the_others_have() -> None:
    kinds: dict[Any, list[Cell]] = defaultdict(list)
    for engine in legal_cells([()]):
        kinds[kind_of(engine)].append(engine)
    some = some_engines(3)
    assert len(some) < sum(map(len, kinds.values())) / 2
    for kind, engines in kinds.items():
        taken = [engine.axes() for engine in some if kind_of(engine) == kind]
        assert count(taken, [engine.axes() for engine in engines], 3).complete, kind


def test_a_missing_row_is_noticed() -> None:
    chosen = cover(ROWS, 2)
    for left_out in chosen[:5]:
        rest = [AXES[place] for place in chosen if place != left_out]
        found = count(rest, AXES, 2)
        assert found.covered <= found.legal
    assert not count([AXES[chosen[0]]], AXES, 2).complete


def test_illegal_interactions_are_not_asked_for() -> None:
    found = count([], AXES, 2)
    assert found.covered == 0
    assert not any(row["role"] == "none" and row["multi_connector"] and not row["offload"] for row in AXES)
    assert found.legal < count([], [*AXES, {**AXES[0], "role": "none", "recompute_failed_loads": "x"}], 2).legal


def test_labels_tell_cells_apart() -> None:
    assert len({cell.label() for cell in CELLS}) == len(CELLS)
    assert Cell.from_plain(CELLS[7].to_plain()) == CELLS[7]
