"""T0: what it finds in sets of policies that are good, and that it notices those that are not."""

import random
from collections.abc import Mapping
from typing import Any

import pytest

from schedloom import Policy, hookimpl
from schedloom.conformance import composition, suite
from schedloom.conformance.cells import Cell, legal_cells
from schedloom.conformance.laboratory import Laboratory
from schedloom.conformance.trial import open_bench
from schedloom.core.claims import Claims
from schedloom.core.errors import ConfigurationError
from schedloom.core.registry import Registry


class First(Policy):
    name = "first"
    claims = Claims(refuses={"second": "the first would starve the second"})

    @hookimpl
    def step_begin(self) -> None:
        pass


class Second(Policy):
    name = "second"

    @hookimpl
    def step_begin(self) -> None:
        pass


class Explodes(Second):
    name = "explodes"

    def __init__(self, settings: Any = None) -> None:
        raise RuntimeError("not a refusal")


class Nameless(Second):
    name = "nameless"

    def __init__(self, settings: Any = None) -> None:
        raise ConfigurationError("something does not fit")


class These(Registry):
    def __init__(self, *policies: type[Policy]) -> None:
        super().__init__([])
        self.policies: Mapping[str, type[Policy]] = {policy.name: policy for policy in policies}

    def names(self) -> list[str]:
        return sorted(self.policies)

    def load(self, name: str) -> type[Policy]:
        return self.policies[name]


def examine(*policies: type[Policy]) -> composition.Composition:
    registry = These(*policies)
    sets = composition.policy_sets(None, registry)
    return composition.examine(legal_cells(sets), registry)


def test_every_installed_set_is_accepted_or_refused_by_name() -> None:
    found = composition.examine(suite.cells_of(suite.Order()))
    assert found.violations == []
    assert found.accepted and found.refused


def test_policies_that_refuse_each_other_are_refused_together_and_accepted_alone() -> None:
    found = examine(First, Second)
    assert found.violations == []
    assert {cell.policies for cell in found.refused} == {("first", "second")}
    assert all("starve" in reason for reason in found.refusals)


def test_a_crash_is_no_refusal() -> None:
    found = examine(Second, Explodes)
    assert found.violations
    assert all("explodes" in violation.message for violation in found.violations)


def test_a_refusal_names_somebody() -> None:
    found = examine(Second, Nameless)
    assert any("refused without a name" in violation.message for violation in found.violations)


@pytest.mark.parametrize("subject", ["first", "second"])
def test_a_subject_is_in_every_set(subject: str) -> None:
    sets = composition.policy_sets(subject, These(First, Second))
    assert sets and all(subject in chosen for chosen in sets)


def test_a_decoder_policy_is_refused_on_a_prefiller() -> None:
    reason = composition.Judge().refusal(Cell(policies=("append_prefill",), role="producer"))
    assert reason is not None and "append_prefill" in reason


def test_engines_refuse_what_t0_refuses(laboratory: Laboratory) -> None:
    """Of every policy alone a few cells of either kind: T0 judges without an engine, and must not judge otherwise."""
    judge = composition.Judge()
    alone = [chosen for chosen in composition.policy_sets(None) if len(chosen) == 1]
    for policies in alone:
        cells = [cell for cell in legal_cells([policies]) if not cell.zeroing and cell.recompute_failed_loads]
        for cell in random.Random(0).sample(cells, 4):
            try:
                open_bench(laboratory, cell).close()
                refused = False
            except ConfigurationError:
                refused = True
            assert refused == (judge.refusal(cell) is not None), cell.label()
