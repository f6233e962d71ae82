"""X4: which leases there are, and when they are refreshed."""

from typing import Any

from schedloom.policies.kv_lease import KVLease
from tests.policies.fakes import FakeEngine, FakePool, FakeRequest


def make(**settings: Any) -> KVLease:
    return KVLease(KVLease.Settings.model_validate(settings))


def finish(policy: KVLease, engine: FakeEngine, *sessions: str | None) -> None:
    for session in sessions:
        policy.request_finished(FakeRequest(session=session), engine)


def step(policy: KVLease, engine: FakeEngine, taken: int) -> list[list[int]]:
    engine.pool.refreshed, engine.pool.num_taken = [], taken
    policy.step_begin(engine)
    return engine.pool.refreshed


def test_a_lease_is_refreshed_when_half_of_what_is_before_it_was_taken() -> None:
    policy, engine = make(), FakeEngine()
    finish(policy, engine, "s")
    assert step(policy, engine, 499) == []
    assert step(policy, engine, 500) == [list(range(10))]
    assert step(policy, engine, 999) == []
    assert step(policy, engine, 1000) == [list(range(10))]


def test_without_a_session_there_is_no_lease() -> None:
    policy, engine = make(), FakeEngine()
    finish(policy, engine, None)
    assert step(policy, engine, 10**6) == []


def test_a_lease_ends_with_its_time() -> None:
    policy, engine = make(ttl_seconds=60), FakeEngine()
    finish(policy, engine, "s")
    engine.now = 60.0
    assert step(policy, engine, 10**6) == []


def test_a_new_turn_replaces_the_lease_of_the_turn_before() -> None:
    policy, engine = make(ttl_seconds=60), FakeEngine()
    finish(policy, engine, "s")
    engine.now = 50.0
    finish(policy, engine, "s")
    engine.now = 100.0
    assert step(policy, engine, 10**6) == [list(range(10, 20))]


def test_the_oldest_leases_end_at_the_cap() -> None:
    policy, engine = make(max_share=0.02), FakeEngine()
    finish(policy, engine, "a", "b", "c")
    assert step(policy, engine, 10**6) == [list(range(10, 20)), list(range(20, 30))]


def test_a_turn_larger_than_the_cap_is_not_leased_and_ends_the_one_before() -> None:
    policy, engine = make(max_share=0.02), FakeEngine()
    finish(policy, engine, "s")
    engine.pool.size = 21
    finish(policy, engine, "s")
    assert step(policy, engine, 10**6) == []


def test_a_turn_that_held_nothing_leaves_the_lease_of_the_one_before() -> None:
    policy, engine = make(), FakeEngine()
    finish(policy, engine, "s")
    engine.pool.size = 0
    finish(policy, engine, "s")
    assert step(policy, engine, 10**6) == [list(range(10))]


def test_leases_never_are_more_than_half_of_the_free_blocks() -> None:
    policy, engine = make(), FakeEngine()
    finish(policy, engine, "a", "b", "c")
    engine.pool.num_free = 40
    assert step(policy, engine, 10**6) == [list(range(10, 20)), list(range(20, 30))]


def test_what_was_reused_is_forgotten() -> None:
    policy, engine = make(), FakeEngine(pool=FakePool(lost=set(range(5))))
    finish(policy, engine, "s")
    assert step(policy, engine, 10**6) == [[5, 6, 7, 8, 9]]
    engine.pool.lost = set(range(10))
    step(policy, engine, 2 * 10**6)
    assert step(policy, engine, 3 * 10**6) == [], "the lease has ended"
