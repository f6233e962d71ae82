"""C5: policies on the model of pure Python, where nothing but schedloom is installed."""

import subprocess
import sys

import pytest

from schedloom.conformance import composition, pure
from schedloom.conformance.mutants import MUTANTS
from schedloom.conformance.pure.asking import Asking
from schedloom.conformance.verdicts import Verdict
from schedloom.core.composition import Hook, PolicySet

POLICIES = [sets for sets in composition.policy_sets(None) if len(sets) != 3 and composition.composes(sets)]
BAD = [name for name, mutant in MUTANTS.items() if mutant.is_policy]


@pytest.mark.parametrize("policies", POLICIES[:10] + POLICIES[-2:], ids="+".join)
def test_the_built_in_policies_keep_their_promises(policies: tuple[str, ...]) -> None:
    found = pure.examine(pure.Model(policies))
    assert found.verdict is Verdict.PASSED, (found.violations, found.missing)


@pytest.mark.parametrize("name", BAD)
def test_a_known_bad_policy_dies_on_what_it_breaks(name: str) -> None:
    assert pure.hunt(MUTANTS[name], 6) is not None


def test_a_hook_that_was_never_asked_is_inconclusive() -> None:
    found = pure.examine(pure.Model(("append_prefill",)), seeds=0)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "asked admit" in found.missing and "token" in found.missing


def test_where_a_policy_raised_is_told() -> None:
    said: list[str] = []

    def broken(*arguments: object) -> None:
        raise KeyError("x")

    policies = PolicySet((), {"admit": (Hook("mine", broken),)})
    Asking(policies, True, lambda invariant, message: said.append(message)).tell("admit", None, None)
    line = broken.__code__.co_firstlineno + 1
    assert said == [f"policy mine raised in admit: KeyError: 'x' (test_pure.py:{line}, in broken)"]


def test_the_same_seed_plays_the_same() -> None:
    one, other = (pure.examine(pure.Model(("append_prefill",)), first_seed=1, seeds=1) for _ in range(2))
    assert one.events == other.events and one.steps == other.steps


def test_no_engine_is_loaded() -> None:
    code = (
        "import sys, schedloom.conformance.pure as p; p.examine(p.Model(()), seeds=1); assert 'vllm' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"vllm", "torch", "numpy"} & set(ended.stdout.split())
