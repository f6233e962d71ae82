"""C3: every set of policies is accepted, or refused with both names and the reason, whatever the order."""

from collections.abc import Sequence
from itertools import combinations, permutations

import pytest

from schedloom import Policy, hookimpl
from schedloom.core import claims
from schedloom.core.claims import QUEUE_ORDER, Claims, conflicts, owned_by
from schedloom.core.composition import PolicyChoice, PolicySet, compose
from schedloom.core.errors import ConfigurationError
from tests.core.fakes import FakeRegistry


class Fake(Policy):
    @hookimpl
    def screen(self) -> None: ...


class Neutral(Fake):
    name = "neutral"


class Shortest(Fake):
    name = "shortest"
    claims = Claims(owns=frozenset({QUEUE_ORDER}))


class Fairest(Fake):
    name = "fairest"
    claims = Claims(owns=frozenset({QUEUE_ORDER, "the size of a batch"}))


class Bucketed(Fake):
    name = "bucketed"
    claims = Claims(owns=frozenset({"the size of a batch"}), refuses={"aloof": "a bucket never fills beside it"})


class Aloof(Fake):
    name = "aloof"
    claims = Claims(
        refuses={"shortest": "it starves whoever is aloof", "bucketed": "it splits buckets", "not_installed": "why not"}
    )


FAKES = (Neutral, Shortest, Fairest, Bucketed, Aloof)
IMPOSSIBLE = {
    ("fairest", "shortest"): ["both decide the order of the waiting queue"],
    ("bucketed", "fairest"): ["both decide the size of a batch"],
    ("aloof", "shortest"): ["it starves whoever is aloof"],
    ("aloof", "bucketed"): ["it splits buckets", "a bucket never fills beside it"],
}
REGISTRY = FakeRegistry({policy.name: policy for policy in FAKES})


def composed(names: Sequence[str]) -> PolicySet:
    return compose([PolicyChoice(name=name) for name in names], REGISTRY)


def outcome(names: Sequence[str]) -> str:
    try:
        return f"accepted: {composed(names).names}"
    except ConfigurationError as refused:
        return str(refused)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_set_is_accepted_or_refused_with_names_and_reason(size: int) -> None:
    for names in combinations(sorted(policy.name for policy in FAKES), size):
        impossible = [pair for pair in combinations(names, 2) if pair in IMPOSSIBLE]
        if not impossible:
            assert composed(names).names == list(names)
            continue
        sentences = [
            f"policies '{first}' and '{second}' cannot be on together: {reason}"
            for first, second in impossible
            for reason in IMPOSSIBLE[first, second]
        ]
        assert outcome(names) == "; ".join(sentences)


@pytest.mark.parametrize("size", [2, 3])
def test_the_outcome_never_depends_on_the_order(size: int) -> None:
    for names in combinations([policy.name for policy in FAKES], size):
        assert len({outcome(order) for order in permutations(names)}) == 1


def test_a_refusal_needs_only_one_side_and_tells_every_reason() -> None:
    assert [str(conflict) for conflict in conflicts([Bucketed(), Aloof()])] == [
        "policies 'aloof' and 'bucketed' cannot be on together: it splits buckets",
        "policies 'aloof' and 'bucketed' cannot be on together: a bucket never fills beside it",
    ]


def test_a_policy_does_not_conflict_with_itself_or_with_an_absent_one() -> None:
    class Hermit(Fake):
        name = "hermit"
        claims = Claims(refuses={"hermit": "one is company", "absent": "nobody is there"})

    assert conflicts([Hermit(), Neutral()]) == []


def test_implementing_the_hook_of_a_resource_owns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_HOOK_OWNERSHIP", {"screen": QUEUE_ORDER})
    assert owned_by(Neutral) == {QUEUE_ORDER}
    assert owned_by(Bucketed) == {QUEUE_ORDER, "the size of a batch"}
    (conflict,) = conflicts([Neutral(), Aloof()])
    assert conflict.reason == "both decide the order of the waiting queue"


@pytest.mark.parametrize("reason", ["", "  "])
def test_a_refusal_without_a_reason_is_no_claim(reason: str) -> None:
    with pytest.raises(ValueError, match="refusing 'x' needs a reason"):
        Claims(refuses={"x": reason})


def test_a_single_name_is_not_taken_for_a_set_of_letters() -> None:
    with pytest.raises(TypeError, match="set of names"):
        Claims(owns=QUEUE_ORDER)  # type: ignore[arg-type]
