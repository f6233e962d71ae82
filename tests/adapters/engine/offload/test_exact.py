"""A5, A9: preempted requests go on exactly, whatever the order of events."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an engine: install schedloom[cpu]")

from schedloom.adapters.engine.offload.metadata import BlockCopies
from schedloom.adapters.engine.offload.scheduler_side import Phase
from tests.adapters.engine.offload.bench import BLOCK, Bench, Setting, our_part

VARIANTS = [(runner, asynchronous) for runner in ("v1", "v2") for asynchronous in (False, True)]


@pytest.fixture(params=VARIANTS, ids=["v1-sync", "v1-async", "v2-sync", "v2-async"])
def setting(request: pytest.FixtureRequest) -> Setting:
    runner, asynchronous = request.param
    return Setting(runner=runner, asynchronous=asynchronous)


def crowd(bench: Bench, count: int = 6, tokens: int = 45) -> None:
    """Requests that together need about twice the blocks there are."""
    for number in range(count):
        bench.add(f"request {number}", prompt_tokens=15 + 3 * number, max_tokens=tokens - number)


@pytest.mark.parametrize("delay", [0, 1, 7])
def test_tokens_are_exact_under_pressure(setting: Setting, delay: int) -> None:
    bench = Bench(setting)
    bench.lane.delay = delay
    crowd(bench)
    bench.drain()
    assert bench.wrong() == []
    assert len(bench.ended) == 6 and set(bench.ended.values()) == {"length"}
    assert bench.counters["restores"] >= 3
    assert any(count % BLOCK for count in bench.restored), "no partial tail was restored"
    assert bench.leaks() == {}


@pytest.mark.parametrize(
    "change", [{"prefix_caching": False}, {"priority": True}, {"role": "kv_both"}, {"beside": "IdleConnector"}]
)
def test_tokens_are_exact_in_every_kind_of_engine(setting: Setting, change: dict[str, Any]) -> None:
    bench = Bench(replace(setting, **change))
    bench.lane.delay = 1
    for number in range(6):
        bench.add(f"request {number}", prompt_tokens=15 + 3 * number, max_tokens=45, priority=number % 3)
    bench.drain()
    assert bench.wrong() == []
    assert bench.counters["restores"] >= 3
    assert bench.leaks() == {}


def test_requests_whose_prompt_was_pulled_are_saved_and_restored_too(setting: Setting) -> None:
    bench = Bench(replace(setting, beside="PullConnector"))
    bench.lane.delay = 1
    for number in range(6):
        bench.add(f"request {number}", prompt_tokens=15 + 3 * number, max_tokens=45, pulled=number % 3 != 2)
    bench.drain()
    assert len(bench.ended) == 6
    assert bench.wrong() == []
    assert bench.counters["restores"] >= 3
    assert bench.leaks() == {}


def test_several_are_restored_at_once_in_a_pool_too_small_for_all(setting: Setting) -> None:
    bench = Bench(setting)
    bench.lane.delay = 4
    crowd(bench, count=8, tokens=60)
    most = 0
    while bench.scheduler.has_requests():
        bench.step()
        phases = [saved.phase for saved in bench.books._requests.values()]
        most = max(most, phases.count(Phase.LOADING))
    bench.drain()
    assert most >= 2
    assert bench.wrong() == []
    assert bench.leaks() == {}


@pytest.mark.parametrize("host_slots", [1, 12])
def test_where_host_memory_is_full_requests_are_recomputed(setting: Setting, host_slots: int) -> None:
    bench = Bench(replace(setting, host_slots=host_slots))
    crowd(bench)
    bench.drain()
    assert bench.wrong() == []
    assert bench.counters["refused_no_capacity"] >= 1
    assert bool(bench.counters["restores"]) == (host_slots > 1)
    assert bench.leaks() == {}


@pytest.mark.parametrize("seed", range(6))
def test_random_aborts_leave_nothing_behind(setting: Setting, seed: int) -> None:
    chance = random.Random(seed)
    bench = Bench(setting)
    crowd(bench, count=10, tokens=50)
    while bench.scheduler.has_requests():
        bench.lane.delay = chance.randrange(6)
        bench.step()
        alive = [name for name, request in bench.scheduler.requests.items() if not request.is_finished()]
        if alive and chance.random() < 0.04:
            held = [name for name in alive if bench.connector.has_preempted_request(name)]
            bench.abort(chance.choice(held or alive))
    bench.lane.delay = 0
    bench.drain()
    assert bench.wrong() == []
    assert bench.leaks() == {}


class WithoutPins:
    """A scheduler side whose references are none."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def touch(self, blocks: Any) -> None:
        pass

    def free_blocks(self, blocks: Any) -> None:
        pass


def skip_the_pins(bench: Bench) -> None:
    bench.books.bind(WithoutPins(bench.books._pool))


def restore_a_wrong_block(bench: Bench) -> None:
    copier = our_part(bench.worker)._worker._copier
    load = copier.load

    def shifted(copies: BlockCopies) -> None:
        load(BlockCopies(copies.group, copies.blocks, copies.slots[1:] + copies.slots[:1]))

    copier.load = shifted


def report_saves_too_early(bench: Bench) -> None:
    worker = our_part(bench.worker)._worker
    submit = worker._submit
    worker._submit = lambda job, copy: submit(job, copy) and (lambda: True)


def forget_the_tail(bench: Bench) -> None:
    copier = our_part(bench.worker)._worker._copier
    save = copier.save
    copier.save = lambda copies: save(BlockCopies(copies.group, copies.blocks[:-1], copies.slots[:-1]))


@pytest.mark.parametrize("fault", [skip_the_pins, restore_a_wrong_block, report_saves_too_early, forget_the_tail])
def test_the_bench_sees_a_broken_connector(setting: Setting, fault: Callable[[Bench], None]) -> None:
    bench = Bench(setting)
    bench.lane.delay = 3
    fault(bench)
    crowd(bench)
    bench.drain()
    assert bench.wrong() != []
