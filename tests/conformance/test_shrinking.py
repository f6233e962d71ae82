"""A long script that breaks an invariant is cut to a short one that breaks the same."""

from collections.abc import Sequence

from schedloom.conformance.cells import Cell
from schedloom.conformance.laboratory import Laboratory
from schedloom.conformance.mutants.blocks import FreesBlocksUnderTransfer
from schedloom.conformance.script import Abort, Act, Arrive, Settle, Step, from_plain, to_plain
from schedloom.conformance.shrinking import shrink
from schedloom.conformance.trial import replay, try_cell

DECODER = Cell(role="consumer")
FAULTS = (FreesBlocksUnderTransfer,)


def test_acts_survive_being_written_down() -> None:
    acts: list[Act] = [
        Arrive(3, 5, 7, parent=1, keep=4, marked=True),
        Step(4),
        Abort(3, twice=True),
        Settle(2, failed=True),
    ]
    assert [from_plain(to_plain(act)) for act in acts] == acts


def test_a_script_is_cut_to_what_breaks_it(laboratory: Laboratory) -> None:
    trials = (try_cell(laboratory, DECODER, seed, faults=FAULTS) for seed in range(20))
    found = next(trial for trial in trials if trial.violations)
    invariant = found.violations[0].invariant

    def breaks_it(acts: Sequence[Act]) -> bool:
        again = replay(laboratory, found.cell, acts, FAULTS)
        return invariant in {violation.invariant for violation in again.violations}

    short = shrink(found.script, breaks_it)
    assert breaks_it(short)
    assert len(short) <= 6 < len(found.script)


def test_replaying_a_seed_gives_the_same_script(laboratory: Laboratory) -> None:
    one, other = (try_cell(laboratory, DECODER, 3) for _ in range(2))
    assert one.script == other.script
    assert one.events == other.events
