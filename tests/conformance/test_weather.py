"""C5: what chance does not bring about is aimed at, in cells in which it hardly ever happens."""

from collections import Counter

import pytest

from schedloom.conformance.cells import Cell
from schedloom.conformance.examination import examine
from schedloom.conformance.invariants import INVARIANTS
from schedloom.conformance.laboratory import Laboratory
from schedloom.conformance.trial import try_cell
from schedloom.conformance.weather import AIMED, AIMED_SEED, AIMS, CLIMATES, aimed_seeds, climate_of

STEPS = 200
CROWDED = Cell(
    policies=("batch_job_aware", "phase_separation", "tpot_guard"), runner="v2", role="both", variant="eagle"
)
SPARED = Cell(
    policies=("offload_restore", "recompute", "short_request_first"),
    asynchronous=True,
    runner="v2",
    role="consumer",
    variant="sliding",
    offload=True,
    multi_connector=True,
    roomy=True,
    prefix_caching=False,
)
"""Cells in which chance hardly ever fills all places, or finds no room for what is to be saved."""


def met_by(laboratory: Laboratory, cell: Cell, event: str) -> int:
    events: Counter[str] = Counter()
    for turn in range(4):
        (seed,) = aimed_seeds([event], turn)
        trial = try_cell(laboratory, cell, seed, STEPS)
        assert not trial.violations
        events += trial.events
    return events[event]


@pytest.mark.parametrize("event", ["contention", "full batch"])
def test_places_fill_where_every_policy_keeps_them_free(laboratory: Laboratory, event: str) -> None:
    assert met_by(laboratory, CROWDED, event)


@pytest.mark.parametrize("event", ["salted hit", "adapter hit"])
def test_tenants_come_back_to_what_is_theirs(laboratory: Laboratory, event: str) -> None:
    assert met_by(laboratory, CROWDED, event)


@pytest.mark.parametrize("event", ["preempted", "resumed", "handed back", "continued"])
def test_blocks_are_wanted_where_there_are_many(laboratory: Laboratory, event: str) -> None:
    assert met_by(laboratory, SPARED, event)


def test_every_aim_is_an_event_that_something_asks_for() -> None:
    assert set(AIMS) <= {event for invariant in INVARIANTS.values() for event in invariant.events}
    assert set(AIMS.values()) == set(AIMED)


def test_only_what_is_missing_is_aimed_at() -> None:
    assert aimed_seeds(["paused"], 3) == []
    assert {climate_of(seed) for seed in aimed_seeds(["contention", "full batch"], 3)} == {AIMS["contention"]}
    assert {climate_of(seed) for seed in aimed_seeds(AIMS, 3)} == set(AIMED)
    assert not set(aimed_seeds(AIMS, 3)) & set(aimed_seeds(AIMS, 4))
    assert {climate_of(seed) for seed in range(AIMED_SEED)[-len(CLIMATES) :]} == set(CLIMATES)


def test_aiming_begins_when_chance_has_had_its_turn_and_is_counted(laboratory: Laboratory) -> None:
    assert examine(laboratory, Cell(), least=3, most=3, steps=1).aimed == 0
    found = examine(laboratory, Cell(), least=3, most=4 + len(AIMED), steps=1)
    assert (found.seeds, found.aimed) == (4 + len(AIMED), len(AIMED))
