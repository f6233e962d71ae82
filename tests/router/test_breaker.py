from __future__ import annotations

from contextlib import suppress

import pytest

from schedloom.core.wire import Role
from schedloom.router.failures import Failure
from schedloom.router.fleet.breaker import BASE_SECONDS, CONSECUTIVE_FAILURES, LONGEST_SECONDS, Breaker, RetryBudget
from schedloom.router.fleet.fleet import Fleet
from schedloom.router.fleet.worker import Worker
from schedloom.router.settings import WorkerSettings
from tests.router.clock import Clock
from tests.router.conftest import Make
from tests.router.fakes import Answer, FakeResponse, contract, decoder, prefiller


def fail(breaker: Breaker, times: int = CONSECUTIVE_FAILURES) -> None:
    for _ in range(times):
        breaker.begin()
        breaker.end(False)


def end(breaker: Breaker, *outcomes: bool | None) -> None:
    for outcome in outcomes:
        breaker.begin()
        breaker.end(outcome)


def test_it_opens_after_failures_in_a_row() -> None:
    breaker = Breaker(Clock())
    end(breaker, False, False, False, False, None, None)
    assert breaker.allows
    end(breaker, False)
    assert not breaker.allows


def test_it_opens_however_often_it_has() -> None:
    """The last of its kind is never left out, and may fail for days."""
    clock = Clock()
    breaker = Breaker(clock)
    fail(breaker)
    for _ in range(2000):
        clock.now += LONGEST_SECONDS
        assert breaker.allows
        end(breaker, False)
    clock.now += LONGEST_SECONDS - 1
    assert not breaker.allows
    clock.now += 1
    assert breaker.allows
    end(breaker, True)
    fail(breaker)
    clock.now += BASE_SECONDS
    assert breaker.allows


def test_it_opens_for_one_that_flaps_and_for_none_that_fails_now_and_then() -> None:
    flapping, mostly_well = Breaker(Clock()), Breaker(Clock())
    for _ in range(2):
        end(flapping, False, False, True, True)
        assert not flapping.is_clean
    assert flapping.allows
    end(flapping, False, False)
    assert not flapping.allows
    for _ in range(100):
        end(mostly_well, False, True, True, True, True)
        assert mostly_well.allows and mostly_well.is_clean


def test_who_is_left_out_and_is_back_is_told() -> None:
    clock, told = Clock(), list[float | None]()
    breaker = Breaker(clock, told.append)
    end(breaker, True, False, True)
    assert not told
    fail(breaker)
    clock.now += BASE_SECONDS
    end(breaker, False)
    clock.now += 2 * BASE_SECONDS
    end(breaker, True, True)
    assert told == [BASE_SECONDS, 2 * BASE_SECONDS, None]


@pytest.mark.anyio
async def test_the_log_says_whose_requests_fail(bench: Make, caplog: pytest.LogCaptureFixture) -> None:
    odd = decoder()
    odd.always = Answer.error(500)
    router = await bench(prefiller(), odd)
    with caplog.at_level("INFO"):
        for _ in range(CONSECUTIVE_FAILURES):
            await router.client.post("/v1/completions", {"model": "fake-model", "prompt": "a"})
    assert "engine-1 fails its requests, and gets none for 30 s unless others do no better" in caplog.messages


def test_one_request_at_a_time_tries_it_again() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    fail(breaker)
    clock.now += BASE_SECONDS
    assert breaker.allows
    breaker.begin()
    assert not breaker.allows
    breaker.end(True)
    assert breaker.allows
    fail(breaker, CONSECUTIVE_FAILURES - 1)
    assert breaker.allows


def test_a_failed_try_keeps_it_open_for_longer_and_a_neutral_one_lets_the_next_try() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    fail(breaker)
    clock.now += BASE_SECONDS
    fail(breaker, 1)
    clock.now += BASE_SECONDS
    assert not breaker.allows
    clock.now += BASE_SECONDS
    breaker.begin()
    breaker.end(None)
    assert breaker.allows


def test_what_fails_all_at_once_leaves_it_out_for_no_longer() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    fail(breaker, 100)
    clock.now += BASE_SECONDS
    assert breaker.allows


def pool(clock: Clock, size: int) -> Fleet:
    workers = [Worker(f"d{i}", WorkerSettings(url=f"http://d{i}:1"), clock) for i in range(size)]
    for worker in workers:
        worker.join(contract(Role.CONSUMER))
    return Fleet(workers)


def test_at_most_half_of_a_pool_is_left_out_and_never_the_last() -> None:
    for size, served_by in ((1, {"d0"}), (2, {"d1"}), (3, {"d1", "d2"}), (4, {"d2", "d3"})):
        clock = Clock()
        fleet = pool(clock, size)
        for worker in fleet.workers:
            clock.now += 1
            fail(worker.breaker)
        assert {fleet.choose_decoder().name for _ in range(8)} == served_by


def test_a_worker_that_fails_is_left_out_within_one_request() -> None:
    fleet = pool(Clock(), 2)
    bad = fleet.workers[0]
    for _ in range(CONSECUTIVE_FAILURES):
        with bad.serving(0) as service:
            service.failed()
    assert {fleet.choose_decoder().name for _ in range(8)} == {"d1"}


def said(status: int, *headers: tuple[bytes, bytes]) -> FakeResponse:
    return FakeResponse(prefiller(), Answer(status, headers=headers))


def test_clients_errors_and_full_workers_open_nothing() -> None:
    clock = Clock()
    fleet = pool(clock, 2)
    one = fleet.workers[0]
    for status in [400, 404, 422, 429, 503] * 10:
        with one.serving(0) as service:
            service.answered(said(status))
    assert one.breaker.allows


def test_a_full_worker_is_left_alone_for_as_long_as_it_says() -> None:
    clock = Clock()
    fleet = pool(clock, 2)
    with fleet.workers[0].serving(0) as service:
        service.answered(said(503, (b"retry-after", b"7")))
    with fleet.workers[1].serving(0), fleet.workers[1].serving(0):
        assert fleet.choose_decoder().name == "d1"
        clock.now += 7
        assert fleet.choose_decoder().name == "d0"


def test_one_that_stays_full_is_left_alone_for_longer_until_it_takes_a_request() -> None:
    clock = Clock()
    (worker,) = pool(clock, 1).workers

    def spared_after(status: int) -> float:
        with worker.serving(0) as service:
            service.answered(said(status))
        return max(0.0, worker.full_until - clock.now)

    assert [spared_after(503) for _ in range(6)] == [1, 2, 4, 8, 16, 16]
    clock.now += 16
    assert (spared_after(200), spared_after(429)) == (0, 1)


def test_what_is_told_behind_the_head_of_a_fine_answer_is_a_failure_too() -> None:
    (worker,) = pool(Clock(), 1).workers
    for status, is_clean in ((400, True), (503, True), (500, False)):
        with suppress(Failure), worker.serving(0) as service:
            service.answered(said(200))
            raise Failure(status, b"")
        assert worker.breaker.is_clean is is_clean


def test_few_requests_have_saved_what_it_takes_to_leave_two_engines_out() -> None:
    clock = Clock()
    budget = RetryBudget(clock)
    for _ in range(100):
        clock.now += 1
        budget.count_request()
    assert sum(budget.take() for _ in range(100)) == 2 * CONSECUTIVE_FAILURES
    for _ in range(50):
        clock.now += 3
        budget.count_request()
        budget.take()
    assert sum(budget.take() for _ in range(100)) < CONSECUTIVE_FAILURES


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.01])
def test_where_every_request_asks_for_one_second_tries_are_no_more_than_their_share(seconds: float) -> None:
    clock = Clock()
    budget, taken = RetryBudget(clock), 0
    for asked in range(1, 1001):
        clock.now += seconds
        budget.count_request()
        taken += budget.take()
        assert taken <= max(3, 0.2 * asked + 1)
    assert taken <= 200


def test_requests_of_the_last_seconds_count_however_long_nobody_tried_again() -> None:
    clock = Clock()
    budget = RetryBudget(clock, saved=0.0)
    for _ in range(200):
        clock.now += 0.1
        budget.count_request()
    assert 10 <= sum(budget.take() for _ in range(100)) <= 20


def test_second_tries_are_a_share_of_requests() -> None:
    clock = Clock()
    budget = RetryBudget(clock)
    assert [budget.take() for _ in range(4)] == [True, True, True, False]
    for _ in range(100):
        budget.count_request()
    assert sum(budget.take() for _ in range(100)) == 17
    clock.now += 20
    assert [budget.take() for _ in range(4)] == [True, True, True, False]


def test_the_budget_forgets_by_halves() -> None:
    clock = Clock()
    budget = RetryBudget(clock, window=10)
    for _ in range(100):
        budget.count_request()
    clock.now += 6
    assert sum(budget.take() for _ in range(30)) == 20
    clock.now += 5
    assert sum(budget.take() for _ in range(30)) == 0
    clock.now += 5
    assert sum(budget.take() for _ in range(30)) == 3
