"""A5, A6: saved KV in every state, and everything that can happen to it there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("vllm", reason="needs an engine: install schedloom[cpu]")

from tests.adapters.engine.offload.bench import Bench, Setting, our_part

NEVER = 10_000
VARIANTS = [(runner, asynchronous) for runner in ("v1", "v2") for asynchronous in (False, True)]
PHASES = ["SAVING", "SAVED", "LOADING"]


@pytest.fixture(params=VARIANTS, ids=["v1-sync", "v1-async", "v2-sync", "v2-async"])
def bench(request: pytest.FixtureRequest) -> Bench:
    runner, asynchronous = request.param
    made = Bench(Setting(runner=runner, asynchronous=asynchronous))
    for number in range(6):
        made.add(f"request {number}", prompt_tokens=15 + 3 * number, max_tokens=45)
    return made


def reach(bench: Bench, phase: str) -> str:
    """Run until some request's KV is in ``phase``, and hold it there."""
    bench.lane.delay = NEVER if phase == "SAVING" else 0
    bench.lane.load_delay = NEVER if phase == "LOADING" else 0
    bench.until(lambda: bench.named(phase) is not None)
    name = bench.named(phase)
    assert name is not None
    return name


def let_go(bench: Bench) -> None:
    """Copies go on: those that were held back, and all others."""
    bench.lane.delay = bench.lane.load_delay = 0
    bench.lane.release()


def assert_clean(bench: Bench) -> None:
    bench.drain()
    assert bench.wrong() == []
    assert bench.leaks() == {}


@pytest.mark.parametrize("phase", PHASES)
def test_an_abort_gives_everything_back_once(bench: Bench, phase: str) -> None:
    name = reach(bench, phase)
    held = set(bench.scheduler.kv_cache_manager.get_block_ids(name)[0])
    bench.abort(name)
    assert (name in bench.scheduler.requests) == (phase == "LOADING")
    if phase == "LOADING":
        bench.step()
        assert set(bench.scheduler.kv_cache_manager.get_block_ids(name)[0]) == held, "freed while being written"
    else:
        assert not bench.connector.has_preempted_request(name)
    let_go(bench)
    assert_clean(bench)
    assert bench.counters["dropped"] == 1


@pytest.mark.parametrize("phase", ["SAVING", "SAVED"])
def test_discarded_kv_is_never_restored(bench: Bench, phase: str) -> None:
    name = reach(bench, phase)
    before = bench.counters["restores"]
    bench.connector.discard_preempted()
    assert not bench.connector.has_preempted_request(name)
    assert not bench.connector.has_pending_block_frees()
    request = bench.scheduler.requests[name]
    assert bench.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    let_go(bench)
    bench.step()
    assert not bench.connector.has_preempted_request(name), "a late report brought it back"
    assert bench.counters["restores"] == before
    assert bench.counters["fallback_discarded"] >= 1
    assert_clean(bench)


def test_a_reset_of_the_prefix_cache_discards(bench: Bench) -> None:
    name = reach(bench, "SAVED")
    bench.settle()
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not bench.connector.has_preempted_request(name)
    assert_clean(bench)


def test_a_load_under_way_cannot_be_discarded(bench: Bench) -> None:
    name = reach(bench, "LOADING")
    bench.connector.discard_preempted()
    assert bench.connector.has_preempted_request(name)
    assert not bench.connector.reset_cache()
    let_go(bench)
    assert_clean(bench)


def test_a_save_that_never_ends_is_given_up(bench: Bench) -> None:
    name = reach(bench, "SAVING")
    bench.now += 31
    bench.lane.delay = 0
    bench.step()
    assert bench.phase_of(name) is None
    assert bench.counters["fallback_save_timed_out"] == 1
    bench.lane.release()
    assert_clean(bench)


def test_while_a_save_is_under_way_nobody_else_is_preempted(bench: Bench) -> None:
    reach(bench, "SAVING")
    preempted = bench.scheduler.reset_preempted_req_ids.copy()
    saves = bench.counters["saves"]
    for _ in range(10):
        assert bench.step().preempted_req_ids <= preempted
    assert bench.counters["saves"] == saves
    let_go(bench)
    assert_clean(bench)


def test_a_save_that_fails_is_recomputed(bench: Bench) -> None:
    bench.lane.fail = True
    bench.until(lambda: bench.counters["fallback_save_failed"] > 0)
    assert bench.counters["saves"] == 0
    bench.lane.fail = False
    assert_clean(bench)


def test_a_load_that_fails_is_recomputed(bench: Bench) -> None:
    reach(bench, "SAVED")
    while not bench.counters["fallback_load_failed"]:
        bench.lane.fail = not bench.connector.has_pending_block_frees()
        bench.step()
    bench.lane.fail = False
    assert_clean(bench)


def test_asking_changes_nothing(bench: Bench) -> None:
    for phase in PHASES:
        name = reach(bench, phase)
        request = bench.scheduler.requests[name]
        first = bench.connector.get_num_new_matched_tokens(request, 0)
        assert [bench.connector.get_num_new_matched_tokens(request, 0) for _ in range(3)] == [first] * 3
        assert bench.phase_of(name) == phase
        let_go(bench)
    assert_clean(bench)


def test_orders_that_come_twice_are_carried_out_once(bench: Bench) -> None:
    worker = our_part(bench.worker)._worker
    copied: list[int] = []
    submit: Callable[..., object] = worker._submit

    def watched(job: object, copy: object) -> object:
        copied.append(job.number)  # type: ignore[attr-defined]
        return submit(job, copy)

    worker._submit = watched
    save, load = worker.save, worker.load
    worker.save = lambda jobs: (save(jobs), save(jobs))
    worker.load = lambda jobs: (load(jobs), load(jobs))
    assert_clean(bench)
    assert bench.counters["restores"] >= 3
    assert len(copied) == len(set(copied))


def test_a_request_can_be_followed_through_its_recovery(bench: Bench) -> None:
    heard: dict[str, list[str]] = {}
    bench.connector.observe_preempted(lambda name, event, tokens: heard.setdefault(name, []).append(event))
    assert_clean(bench)
    assert ["saved", "loading", "restores"] in [events[:3] for events in heard.values()]
    for events in heard.values():
        assert events.count("saved") == events.count("restores") + events.count("superseded")
