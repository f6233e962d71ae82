"""The same acts as a Hypothesis state machine: it chooses the cell and the schedule, and shrinks both."""

from __future__ import annotations

from typing import Any

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


def machine(laboratory: Laboratory, cells: list[Cell], faults: tuple[type, ...] = ()) -> type[RuleBasedStateMachine]:
    """A machine over ``cells``. It fails with the bench's violations."""

    class EngineMachine(RuleBasedStateMachine):
        bench: Bench

        def __init__(self) -> None:
            super().__init__()
            self.arrived = 0

        @initialize(cell=st.sampled_from(cells))
        def start(self, cell: Cell) -> None:
            self.bench = open_bench(laboratory, cell, faults)

        @rule(fresh=TOKENS, answer=TOKENS, salt=SALTS, back=st.integers(0, 4), keep=st.integers(0, 120), data=st.data())
        def arrive(self, fresh: int, answer: int, salt: str | None, back: int, keep: int, data: Any) -> None:
            cell = self.bench.cell
            kinds = [""] + ["receive"] * cell.receives + ["send"] * cell.sends
            marked = bool(cell.policies) and data.draw(st.booleans(), "marked")
            act = script.Arrive(
                self.arrived,
                fresh,
                answer,
                parent=self.arrived - back if 0 < back <= self.arrived else None,
                keep=keep,
                marked=marked,
                transfer="" if marked else data.draw(st.sampled_from(kinds), "transfer"),
                salt=salt,
                priority=data.draw(st.integers(0, 2), "priority") if cell.priority else 0,
                fast=cell.receives and data.draw(st.booleans(), "fast"),
                continuable=hands_back(cell) and data.draw(st.booleans(), "continuable"),
                seeded=hands_back(cell) and data.draw(st.booleans(), "seeded"),
            )
            self.arrived += 1
            self.bench.do(act)

        @rule(count=st.sampled_from([1, 1, 2, 5]), throttled=st.booleans())
        def step(self, count: int, throttled: bool) -> None:
            self.bench.do(script.Step(count, throttled))

        @precondition(lambda self: self.arrived)
        @rule(back=st.integers(1, 8), twice=st.booleans())
        def abort(self, back: int, twice: bool) -> None:
            self.bench.do(script.Abort(self.arrived - back, twice))

        @precondition(lambda self: self.arrived and self.bench.engine.transfers)
        @rule(place=st.integers(0, 7), failed=st.booleans())
        def settle(self, place: int, failed: bool) -> None:
            under_way = self.bench.engine.transfers
            self.bench.do(script.Settle(number_of(under_way[place % len(under_way)]), failed))

        @rule(
            act=st.one_of(
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
        )
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

    return EngineMachine
