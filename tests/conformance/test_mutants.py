"""Every known-bad subject fails, and through the oracle of the invariant that it breaks."""

import pytest

from schedloom.conformance.invariants import INVARIANTS
from schedloom.conformance.laboratory import Laboratory
from schedloom.conformance.mutants import MUTANTS
from schedloom.conformance.trial import hunt

SEEDS = 28
FAULTS = [name for name, mutant in MUTANTS.items() if not (mutant.is_policy or mutant.tier)]
"""Those tried on vLLM's schedulers; policies are tried on the pure model, and those of the router in their tier."""


@pytest.mark.parametrize("name", FAULTS)
def test_it_dies_on_the_named_invariant(laboratory: Laboratory, name: str) -> None:
    mutant = MUTANTS[name]
    found = hunt(laboratory, mutant, SEEDS)
    assert found is not None, f"{name} survived {SEEDS} seeds: {mutant.description}"
    assert mutant.dies_on in {violation.invariant for violation in found.violations}


@pytest.mark.parametrize("name", MUTANTS)
def test_its_invariant_exists(name: str) -> None:
    assert MUTANTS[name].dies_on in INVARIANTS
