"""B1, B13: policies that spread load: round robin, power of two choices, least tokens."""

from collections import Counter

import pytest

from schedloom.core.composition import PolicyChoice, compose
from schedloom.core.errors import ConfigurationError
from schedloom.core.routing import Leg
from schedloom.policies.least_tokens import LeastTokens
from schedloom.policies.power_of_two import PowerOfTwo
from schedloom.policies.round_robin import RoundRobin
from tests.policies.routing import FakeCandidate, FakeView

SPREADERS = ["least_tokens", "power_of_two", "prefill_cost", "round_robin"]


def best(scores: list[float]) -> int:
    return scores.index(max(scores))


def test_round_robin_gives_each_its_turn_on_each_leg() -> None:
    policy, engines = RoundRobin(), [FakeCandidate(name) for name in "abc"]
    turns = [best(policy.score_workers(Leg.PREFILL, engines)) for _ in range(6)]
    assert turns == [0, 1, 2, 0, 1, 2]
    assert best(policy.score_workers(Leg.DECODE, engines)) == 0


def test_after_the_one_whose_turn_it_is_comes_the_next() -> None:
    scores = RoundRobin().score_workers(Leg.PREFILL, [FakeCandidate(name) for name in "abcd"])
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == 4


def test_of_two_drawn_the_less_busy_is_preferred_and_everybody_is_drawn() -> None:
    policy, view = PowerOfTwo(), FakeView()
    engines = [FakeCandidate(str(load), in_flight=load) for load in range(5)]
    chosen = Counter(best(policy.score_workers(engines, view)) for _ in range(1000))
    assert set(chosen) == {0, 1, 2, 3}
    assert [place for place, _ in chosen.most_common()] == [0, 1, 2, 3]


def test_the_draw_is_the_seeds() -> None:
    engines = [FakeCandidate(str(load), in_flight=load) for load in range(5)]
    histories = []
    for _ in range(2):
        view = FakeView()
        histories.append([PowerOfTwo().score_workers(engines, view) for _ in range(20)])
    assert histories[0] == histories[1]


def test_one_engine_needs_no_draw() -> None:
    assert PowerOfTwo().score_workers([FakeCandidate("a")], FakeView()) == [1.0]


def test_few_long_requests_weigh_more_than_many_short_ones() -> None:
    long = FakeCandidate("long", in_flight=1, in_flight_bytes=400_000)
    short = FakeCandidate("short", in_flight=9, in_flight_bytes=9_000)
    assert best(LeastTokens().score_workers([long, short])) == 1
    assert LeastTokens().score_workers([FakeCandidate("a"), FakeCandidate("b")]) == [1.0, 1.0]


@pytest.mark.parametrize("one", SPREADERS)
@pytest.mark.parametrize("other", SPREADERS)
def test_only_one_policy_spreads_load(one: str, other: str) -> None:
    if one < other:
        with pytest.raises(ConfigurationError, match=f"{one}.*{other}.*how load is spread"):
            compose([PolicyChoice(name=one), PolicyChoice(name=other)], side="router")
