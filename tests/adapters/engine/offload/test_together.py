"""X1, A5, A9: preempted requests are saved and restored under every other policy that composes with it."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an engine: install schedloom[cpu]")

from schedloom.core.wire import JOB_CLASS_KEY
from tests.adapters.engine.conftest import choose
from tests.adapters.engine.offload.bench import Bench, Setting

COMMON = (choose("append_prefill"), choose("balance"), choose("kv_lease"))
PHASES = choose("phase_separation", prefill_token_buckets=[8, 32], decode_batch_buckets=[2, 4])
GUARD = choose("tpot_guard", tpot_ms=0.01, min_chunk_tokens=4)
ORDERS = (choose("short_request_first", short_tokens=20), choose("batch_job_aware", max_active=2))


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("order", ORDERS, ids=lambda choice: choice.name)
@pytest.mark.parametrize("metered", [PHASES, GUARD], ids=lambda choice: choice.name)
def test_restores_are_exact_beside_all_others(runner: str, asynchronous: bool, order: Any, metered: Any) -> None:
    bench = Bench(Setting(runner=runner, asynchronous=asynchronous, others=(*COMMON, metered, order)))
    bench.lane.delay = 2
    for number in range(8):
        bench.add(f"request {number}", prompt_tokens=12 + 3 * number, max_tokens=45 - number)
        bench.scheduler.requests[f"request {number}"].session_id = "ab"[number % 2]
    bench.drain()
    assert bench.wrong() == []
    assert set(bench.ended.values()) == {"length"} and len(bench.ended) == 8
    assert bench.counters["restores"] >= 2, "inconclusive: hardly anything was restored"
    assert bench.leaks() == {}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_batch_job_that_is_being_saved_counts_against_the_bound(asynchronous: bool) -> None:
    bench = Bench(Setting(asynchronous=asynchronous, others=(choose("batch_job_aware", max_active=1),)))
    bench.lane.delay = 1000
    bench.add("interactive", prompt_tokens=50, max_tokens=60)
    add_batch_job(bench, "first")
    bench.until(lambda: bench.phase_of("first") == "SAVING")
    bench.abort("interactive")
    add_batch_job(bench, "second")
    for _ in range(5):
        bench.step()
    assert "second" not in bench.produced
    bench.lane.delay = 0
    bench.lane.release()
    bench.drain()
    assert set(bench.produced) == {"interactive", "first", "second"} and bench.wrong() == []
    assert not bench.scheduler.preempted


def add_batch_job(bench: Bench, name: str) -> None:
    bench.add(name, prompt_tokens=20, max_tokens=40)
    bench.scheduler.requests[name].sampling_params.extra_args = {JOB_CLASS_KEY: "batch"}
