"""X1, A4: the policies all at once, under pressure, and in any order of their names."""

import random
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from schedloom.core.wire import JOB_CLASS_KEY
from tests.adapters.engine.conftest import Make, choose
from tests.adapters.engine.harness import TOKEN, FakeRunner, make_request, tokens

COMMON = ("append_prefill", "balance", "kv_lease")
PHASES = choose("phase_separation", prefill_token_buckets=[64, 256], decode_batch_buckets=[4, 8])
ORDERS = (choose("short_request_first", short_tokens=100), choose("batch_job_aware", max_active=2))


def play(runner: FakeRunner, seed: int, reset: bool) -> list[dict[str, int]]:
    """Sessions, batch jobs and local attempts in a pool too small for them, with aborts and resets."""
    chance = random.Random(seed)
    now = [0.0]
    runner.scheduler.view.clock = lambda: now[0]
    trace = []
    for index in range(40):
        now[0] += 1.0
        marked = chance.random() < 0.3
        request = make_request(f"r{index}", tokens(chance.randrange(12), chance.randrange(20, 300)), 40, marked)
        request.session_id = chance.choice([None, "a", "b", "c"])
        job = {JOB_CLASS_KEY: "batch"} if chance.random() < 0.3 else {}
        request.sampling_params.extra_args = {**(request.sampling_params.extra_args or {}), **job}
        runner.scheduler.add_request(request)
        trace += [dict(runner.step().num_scheduled_tokens) for _ in range(chance.randrange(4))]
        if chance.random() < 0.2:
            runner.scheduler.finish_requests(f"r{chance.randrange(index + 1)}", RequestStatus.FINISHED_ABORTED)
        if reset and chance.random() < 0.1:
            assert runner.scheduler.reset_prefix_cache(reset_running_requests=True)
    runner.drain(5000)
    return trace


def wrong(runner: FakeRunner) -> list[str]:
    """One end for each, with all its tokens or, turned away, with none; and nothing left behind."""
    complaints = []
    for name, (reason, stop) in runner.ended.items():
        expected = [] if reason == "stop" and stop else [TOKEN] * 40
        if runner.produced[name] != expected:
            complaints.append(f"{name}: {reason} {stop} after {len(runner.produced[name])} tokens")
    pool = runner.scheduler.kv_cache_manager.block_pool
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    if not len(free) == len(set(free)) == pool.num_gpu_blocks - 1:
        complaints.append(f"{len(free)} free blocks of {pool.num_gpu_blocks}")
    return complaints


def record_preemptions(scheduler: Any) -> list[str]:
    names: list[str] = []
    original = scheduler._preempt_request

    def recorded(request: Any, *rest: Any, **more: Any) -> Any:
        names.append(request.request_id)
        return original(request, *rest, **more)

    scheduler._preempt_request = recorded
    return names


@pytest.mark.parametrize("order", ORDERS, ids=lambda choice: choice.name)
@pytest.mark.parametrize("metered", [PHASES, "tpot_guard"], ids=["phases", "tpot"])
def test_everything_at_once(make: Make, order: Any, metered: Any) -> None:
    preemptions = 0
    for seed in range(2):
        runner = make(*COMMON, metered, order, num_blocks=45, max_num_seqs=12)
        preempted = record_preemptions(runner.scheduler)
        play(runner, seed, reset=False)
        preemptions += len(preempted)
        assert wrong(runner) == []
    assert preemptions > 4, "inconclusive: hardly anything was preempted"


@pytest.mark.parametrize("order", ORDERS, ids=lambda choice: choice.name)
def test_everything_at_once_with_resets(make: Make, order: Any) -> None:
    """Without a connector: vLLM itself cannot reset while one may still write."""
    for seed in range(2):
        runner = make("balance", "kv_lease", PHASES, order, num_blocks=60, max_num_seqs=12, role=None)
        play(runner, seed, reset=True)
        assert wrong(runner) == []


@pytest.mark.parametrize("order", ORDERS, ids=lambda choice: choice.name)
def test_the_order_of_names_changes_nothing(make: Make, order: Any) -> None:
    names = [*COMMON, PHASES, order]
    traces = []
    for seed in range(3):
        random.Random(seed).shuffle(names)
        traces.append(play(make(*names, num_blocks=45, max_num_seqs=12), 7, reset=False))
    assert traces[0] == traces[1] == traces[2]
