"""A4: a rank waits for its full peers, and not for ever."""

from dataclasses import replace

import pytest

from schedloom.core.decisions import Verdict
from schedloom.core.views import PeerLoad
from schedloom.policies.balance import Balance
from tests.policies.fakes import FakeEngine, FakeRequest

ROOM = PeerLoad(rank=1, age=0.01, running=3, waiting=9, max_running=8, kv_usage=0.5)
FULL = replace(ROOM, rank=2, running=8)


def held(policy: Balance, engine: FakeEngine, now: float) -> bool:
    engine.now = now
    answer = policy.admit(FakeRequest(), engine)
    assert answer is None or answer.verdict is Verdict.HOLD
    return answer is not None


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        ([], False),
        ([ROOM], False),
        ([ROOM, FULL], True),
        ([replace(ROOM, kv_usage=0.95)], True),
        ([replace(FULL, age=1.1)], False),
    ],
)
def test_full_peers_that_are_heard_hold(peers: list[PeerLoad], expected: bool) -> None:
    assert held(Balance(), FakeEngine(peers=peers), 5.0) is expected


def test_a_hold_is_bounded_until_nobody_is_full() -> None:
    policy, engine = Balance(), FakeEngine(peers=[FULL])
    assert [held(policy, engine, now / 10) for now in range(14)] == [True] * 10 + [False] * 4
    engine.peers = [ROOM]
    assert not held(policy, engine, 1.5)
    engine.peers = [FULL]
    assert held(policy, engine, 1.6)


def test_a_hold_of_long_ago_is_not_counted() -> None:
    policy, engine = Balance(), FakeEngine(peers=[FULL])
    assert held(policy, engine, 0.0)
    policy.request_finished(FakeRequest(), engine)
    assert held(policy, engine, 100.0)


def test_a_hold_goes_on_while_nobody_asks() -> None:
    """Steps may take longer than what peers said remains true."""
    policy, engine = Balance(), FakeEngine(peers=[FULL])
    assert held(policy, engine, 0.0)
    assert not held(policy, engine, 1.2)
    engine.peers = [ROOM]
    assert not held(policy, engine, 1.3)
    engine.peers = [FULL]
    assert held(policy, engine, 2.5)
