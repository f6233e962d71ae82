"""X1, T0 of the router: what it finds in good sets of routing policies, and that it notices those that are not good."""

from itertools import combinations
from typing import Any

from schedloom import Policy, hookimpl
from schedloom.conformance import routing
from schedloom.core.claims import LOAD_SPREAD, PREFIX_CHOICE, Claims
from schedloom.core.errors import ConfigurationError
from tests.conformance.test_composition import These

SPREADERS = {"least_tokens", "power_of_two", "prefill_cost", "round_robin"}
PREFIXES = {"kv_residency", "prefill_cost", "prefix_aware"}


class Scores(Policy):
    name = "scores"

    @hookimpl
    def score_workers(self) -> None:
        return None


class Explodes(Scores):
    name = "explodes"

    def __init__(self, settings: Any = None) -> None:
        raise RuntimeError("not a refusal")


class Nameless(Scores):
    name = "nameless"

    def __init__(self, settings: Any = None) -> None:
        raise ConfigurationError("something does not fit")


class Elsewhere(Policy):
    name = "elsewhere"

    @hookimpl
    def step_begin(self) -> None:
        pass


def test_every_installed_set_is_accepted_or_refused_by_name() -> None:
    found = routing.examine()
    assert found.violations == []
    names = routing.routing_policies()
    assert set(names) >= SPREADERS | PREFIXES | {"session_owner", "ttft_slo"}
    pairs = {pair: pair in found.accepted for pair in combinations(names, 2)}
    contradict = {pair for pair in pairs if set(pair) <= SPREADERS or set(pair) <= PREFIXES}
    assert {pair for pair, accepted in pairs.items() if not accepted} == contradict


def test_a_refusal_says_what_both_decide() -> None:
    reasons = set(routing.examine().refusals)
    assert all(f"both decide {LOAD_SPREAD}" in one or f"both decide {PREFIX_CHOICE}" in one for one in reasons)


def test_a_subject_is_in_every_set() -> None:
    found = routing.examine("ttft_slo")
    assert found.accepted and all("ttft_slo" in names for names in [*found.accepted, *found.refused])


def test_what_an_engine_calls_is_not_examined() -> None:
    assert routing.routing_policies(These(Scores, Elsewhere)) == ["scores"]


def test_a_crash_is_no_refusal() -> None:
    found = routing.examine(registry=These(Scores, Explodes))
    assert found.violations and all("explodes" in violation.message for violation in found.violations)


def test_a_refusal_names_somebody() -> None:
    found = routing.examine(registry=These(Scores, Nameless))
    assert any("refused without a name" in violation.message for violation in found.violations)


def test_claims_are_the_same_whoever_is_named_first() -> None:
    first = type("First", (Scores,), {"name": "first", "claims": Claims(owns=frozenset({LOAD_SPREAD}))})
    second = type("Second", (Scores,), {"name": "second", "claims": Claims(refuses={"first": "they fight"})})
    found = routing.examine(registry=These(first, second))
    assert found.violations == [] and found.refused == [("first", "second")]
