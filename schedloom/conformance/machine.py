"""The same acts as a Hypothesis state machine: it chooses the cell and the schedule, and shrinks both."""

from __future__ import annotations

from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from schedloom.conformance import script
from schedloom.conformance.applicability import hands_back
from schedloom.conformance.bench import Bench, number_of
from schedloom.conformance.cells import Cell
from schedloom.conformance.laboratory import Laboratory
from schedloom.conformance.trial import open_bench

TOKENS = st.integers(1, 40)
SALTS = st.sampled_from([None, None, None, "tenant 0", "tenant 1"])
DISTURBANCES = st.one_of(
    st.builds(script.Squeeze, st.integers(1, 100)),
    st.just(script.Relax()),
    st.just(script.Synchronise()),
    st.builds(script.Reset, st.booleans(), st.booleans()),
    st.builds(script.Pause, st.booleans()),
    st.just(script.Resume()),
    st.builds(script.Wait, st.sampled_from([0.5, 60.0])),
    st.just(script.Lose()),
    st.builds(script.Silence, st.sampled_from([1, 60])),
)


def machine(laboratory: Laboratory, cells: list[Cell], faults: tuple[type, ...] = ()) -> type[EngineMachine]:
    """A machine over ``cells``. It fails with the bench's violations."""
    return type("Machine", (EngineMachine,), {"laboratory": laboratory, "cells": cells, "faults": faults})


class EngineMachine(RuleBasedStateMachine):
    """An engine of one of ``cells``, to which anything may happen."""

    laboratory: ClassVar[Laboratory]
    cells: ClassVar[list[Cell]]
    faults: ClassVar[tuple[type, ...]]
    bench: Bench

    def __init__(self) -> None:
        super().__init__()
        self.arrived = 0

    @initialize(data=st.data())
    def start(self, data: Any) -> None:
        cell = data.draw(st.sampled_from(self.cells), "cell")
        self.bench = open_bench(self.laboratory, cell, self.faults)

    @rule(data=st.data(), marked=st.booleans())
    def arrive(self, data: Any, marked: bool) -> None:
        act = data.draw(arrivals(self.bench.cell, self.arrived, marked and bool(self.bench.cell.policies)), "arrive")
        self.arrived += 1
        self.bench.do(act)

    @rule(act=st.builds(script.Step, st.sampled_from([1, 1, 2, 5]), st.booleans()))
    def step(self, act: script.Act) -> None:
        self.bench.do(act)

    @precondition(lambda self: self.arrived)
    @rule(back=st.integers(1, 8), twice=st.booleans())
    def abort(self, back: int, twice: bool) -> None:
        self.bench.do(script.Abort(self.arrived - back, twice))

    @precondition(lambda self: self.arrived and self.bench.engine.transfers)
    @rule(place=st.integers(0, 7), failed=st.booleans())
    def settle(self, place: int, failed: bool) -> None:
        under_way = self.bench.engine.transfers
        self.bench.do(script.Settle(number_of(under_way[place % len(under_way)]), failed))

    @rule(act=DISTURBANCES)
    def disturb(self, act: script.Act) -> None:
        self.bench.do(act)

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        try:
            if not self.bench.violations:
                self.bench.do(script.Drain())
        finally:
            self.bench.close()


def arrivals(cell: Cell, number: int, marked: bool) -> st.SearchStrategy[script.Arrive]:
    """The request with this ``number``, of any kind that an engine of ``cell`` may get."""
    kinds = [""] + ["receive"] * cell.receives + ["send"] * cell.sends
    returnable = st.booleans() if hands_back(cell) else st.just(False)
    return st.builds(
        script.Arrive,
        st.just(number),
        fresh=TOKENS,
        max_tokens=TOKENS,
        parent=st.one_of(st.none(), st.integers(max(0, number - 4), number - 1)) if number else st.none(),
        keep=st.integers(0, 120),
        marked=st.just(marked),
        transfer=st.just("") if marked else st.sampled_from(kinds),
        salt=SALTS,
        priority=st.integers(0, 2) if cell.priority else st.just(0),
        fast=st.booleans() if cell.receives else st.just(False),
        continuable=returnable,
        seeded=returnable,
    )
