"""B13: SLO-aware routing: engines that are expected to answer in time."""

import pytest

from schedloom.core.routing import AttemptReport, Ending, Leg, RouteRequest
from schedloom.policies.ttft_slo import TtftSlo
from schedloom.policies.ttft_slo.pace import Pace
from schedloom.policies.ttft_slo.policy import TtftSloSettings
from tests.policies.routing import FakeCandidate, answered, request

FAST, SLOW = FakeCandidate("fast"), FakeCandidate("slow")


def taught() -> TtftSlo:
    """``fast`` does a megabyte in a second, ``slow`` in ten; both take a tenth of a second beside."""
    policy = TtftSlo()
    for size in (10_000, 200_000, 500_000):
        policy.attempt_finished(request(size=size), answered(FAST, seconds=0.1 + size / 1e6))
        policy.attempt_finished(request(size=size), answered(SLOW, seconds=0.1 + size / 1e5))
    return policy


def bounded(milliseconds: str, size: int = 100_000) -> RouteRequest:
    return request(size=size, ttft_slo_ms=milliseconds)


def test_who_is_expected_to_be_late_is_left_out() -> None:
    policy = taught()
    assert policy.filter_workers(bounded("500"), Leg.PREFILL, [SLOW, FAST]) == [FAST]
    assert policy.filter_workers(bounded("5000"), Leg.PREFILL, [SLOW, FAST]) == [SLOW, FAST]
    assert policy.filter_workers(bounded("1"), Leg.PREFILL, [SLOW, FAST]) == []


def test_what_is_under_way_counts() -> None:
    busy = FakeCandidate("fast", in_flight=3, in_flight_bytes=600_000)
    assert taught().filter_workers(bounded("500"), Leg.PREFILL, [busy]) == []


def test_the_soonest_is_preferred() -> None:
    slow, fast = taught().score_workers(bounded("500"), Leg.PREFILL, [SLOW, FAST]) or (0.0, 0.0)
    assert fast == 1.0
    assert slow == pytest.approx(0.2 / 1.1, rel=1e-3)


def test_an_unknown_engine_is_tried() -> None:
    unknown = FakeCandidate("unknown")
    assert taught().filter_workers(bounded("500"), Leg.PREFILL, [SLOW, unknown]) == [unknown]


def test_legs_are_learned_apart() -> None:
    assert taught().filter_workers(bounded("1"), Leg.DECODE, [SLOW, FAST]) == [SLOW, FAST]


@pytest.mark.parametrize("hint", ["soon", "-1", "0", "nan", ""])
def test_what_is_no_bound_is_none(hint: str) -> None:
    assert taught().filter_workers(bounded(hint), Leg.PREFILL, [SLOW]) is None
    assert taught().score_workers(bounded(hint), Leg.PREFILL, [SLOW]) is None


def test_a_default_holds_for_those_who_say_nothing() -> None:
    policy = TtftSlo(TtftSloSettings(default_ms=500))
    policy.attempt_finished(request(size=100_000), answered(SLOW, seconds=1.1))
    assert policy.filter_workers(request(size=100_000), Leg.PREFILL, [SLOW, FAST]) == [FAST]


def test_a_failure_teaches_no_pace() -> None:
    policy = TtftSlo()
    policy.attempt_finished(request(size=1), AttemptReport(Leg.PREFILL, SLOW, Ending.FAILED, 60.0, first_byte=60.0))
    assert policy.filter_workers(bounded("500"), Leg.PREFILL, [SLOW]) == [SLOW]


def test_local_attempts_are_nobody_elses_to_bound() -> None:
    assert taught().filter_workers(bounded("1"), Leg.APPEND, [SLOW]) is None


def test_a_pace_follows_a_change() -> None:
    pace = Pace()
    for size in range(1000, 101_000, 1000):
        pace.learn(size, size / 1e6)
    for size in range(1000, 101_000, 1000):
        pace.learn(size, size / 1e5)
    assert pace.expected(50_000) == pytest.approx(0.5, rel=0.05)


def test_sizes_of_one_kind_are_scaled() -> None:
    pace = Pace()
    for _ in range(5):
        pace.learn(1000, 0.2)
    assert pace.expected(5000) == pytest.approx(1.0)
    assert pace.expected(10) == pytest.approx(0.2)
