"""Stateful random schedules: Hypothesis finds nothing in the real thing, and finds and shrinks a planted fault."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from schedloom.conformance.bench import Broken
from schedloom.conformance.cells import Cell
from schedloom.conformance.laboratory import Laboratory
from schedloom.conformance.machine import machine
from schedloom.conformance.mutants.blocks import LeaksTailBlock
from schedloom.conformance.mutants.requests import RestartsAfterPreemption

QUICK = settings(
    max_examples=12,
    stateful_step_count=40,
    database=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
CELLS = [
    Cell(policies=policies, role="consumer", asynchronous=asynchronous, runner=runner)
    for policies in ((), ("append_prefill",))
    for asynchronous in (False, True)
    for runner in ("v1", "v2")
]


def test_it_finds_nothing(laboratory: Laboratory) -> None:
    run_state_machine_as_test(machine(laboratory, CELLS), settings=QUICK)


@pytest.mark.parametrize(("fault", "invariant"), [(LeaksTailBlock, "KV-2"), (RestartsAfterPreemption, "OUT-3")])
def test_it_finds_a_fault(laboratory: Laboratory, fault: type, invariant: str) -> None:
    cells = [cell for cell in CELLS if not cell.policies and not cell.asynchronous]
    found = settings(QUICK, max_examples=200, phases=(Phase.generate,))
    with pytest.raises(Broken, match=invariant):
        run_state_machine_as_test(machine(laboratory, cells, (fault,)), settings=found)
