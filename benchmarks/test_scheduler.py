"""R15, C6: what a composed scheduler's steps cost, as ratios to vLLM's own class in the same run.

A step is ``schedule()`` plus ``update_from_output()``. Both schedulers do the same work in turn, round by round, so
that a machine whose speed drifts slows both; a figure is the ratio of the two medians.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.conftest import Figures
from schedloom.adapters.engine.scheduler import composed
from schedloom.core.composition import PolicyChoice, compose
from tests.adapters.engine.harness import (
    FakeRunner,
    make_request,
    make_scheduler,
    stock_class,
    tokens,
    vllm_config,
    write_model,
)
from tests.adapters.engine.test_no_copy import copied_runs

RUNNING = 256
PROMPT = 512
POLICIES = ("append_prefill", "offload_restore", "recompute", "tpot_guard")
UNMETERED = {"tpot_guard": {"tpot_ms": 10_000}}
"""A bound that never cuts, so that both schedulers schedule the same."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def runner(model: Path, policies: tuple[str, ...], slots: int = 512) -> FakeRunner:
    choices = [PolicyChoice.model_validate({"name": name, **UNMETERED.get(name, {})}) for name in policies]
    cls = composed(stock_class(False), compose(choices)) if policies else stock_class(False)
    config = vllm_config(model, max_num_seqs=slots, token_budget=8192)
    return FakeRunner(make_scheduler(cls, config, num_blocks=60_000), asynchronous=False)


def pair(model: Path, slots: int = 512) -> tuple[FakeRunner, FakeRunner]:
    """Stock and composed, each with 256 running requests."""
    both = runner(model, (), slots), runner(model, POLICIES, slots)
    for one in both:
        for index in range(RUNNING):
            one.scheduler.add_request(make_request(f"r{index}", tokens(index, PROMPT), max_tokens=7000))
        one.steps(40)
        assert len(one.scheduler.running) == RUNNING
    gc.collect()
    gc.freeze()
    return both


def step_seconds(one: FakeRunner) -> float:
    """Seconds of one step, without the fake model runner's share."""
    started = time.perf_counter()
    scheduled = one.scheduler.schedule()
    between = time.perf_counter()
    produced = one.run(scheduled)
    resumed = time.perf_counter()
    one.scheduler.update_from_output(scheduled, produced)
    return time.perf_counter() - resumed + between - started


def medians(both: tuple[FakeRunner, FakeRunner], rounds: int, prepare: Callable[[FakeRunner, int], Any]) -> list[float]:
    """Median seconds of one step of each, the two in turn, ``prepare`` being called before each."""
    times: list[list[float]] = [[], []]
    for index in range(rounds):
        for which in (0, 1) if index % 2 else (1, 0):
            prepare(both[which], index)
            times[which].append(step_seconds(both[which]))
    return [statistics.median(one) for one in times]


def nothing(one: FakeRunner, index: int) -> None:
    pass


def test_decode(model: Path, figures: Figures, benchmark: Any) -> None:
    both = pair(model)
    stock, ours = medians(both, 600, nothing)
    figures["decode_256"] = round(ours / stock, 4)
    benchmark.pedantic(lambda: step_seconds(both[1]), rounds=50)
    assert figures["decode_256"] < 1.15


def test_mixed(model: Path, figures: Figures, benchmark: Any) -> None:
    both = pair(model)

    def add_prefill(one: FakeRunner, index: int) -> None:
        one.scheduler.add_request(make_request(f"p{index}", tokens(1000 + index, 256), max_tokens=1))

    stock, ours = medians(both, 300, add_prefill)
    figures["mixed_256"] = round(ours / stock, 4)
    benchmark.pedantic(lambda: step_seconds(both[1]), rounds=20)
    assert figures["mixed_256"] < 1.2


def test_admitting(model: Path, figures: Figures, benchmark: Any) -> None:
    both = pair(model)

    def add_waiting(one: FakeRunner, index: int) -> None:
        one.drain_finished()
        for number in range(64):
            prompt = tokens(number, PROMPT) + tokens(5000 + number, 20)
            one.scheduler.add_request(make_request(f"w{index}.{number}", prompt, max_tokens=1, marked=True))

    stock, ours = medians(both, 120, add_waiting)
    figures["admit_64"] = round(ours / stock, 4)
    benchmark.pedantic(lambda: step_seconds(both[1]), rounds=5)
    assert figures["admit_64"] < 1.3


def test_screening(model: Path, figures: Figures, benchmark: Any) -> None:
    """The share of a stock step with 256 running that screening a queue of 10,000 marked requests takes."""
    both = pair(model, slots=RUNNING)
    prompt = tokens(0, PROMPT) + tokens(7, 40)
    for one in both:
        for index in range(10_000):
            one.scheduler.add_request(make_request(f"q{index}", [*prompt, index % 500, index // 500], marked=True))
        one.steps(3)
    times: list[list[float]] = [[], []]
    for _ in range(400):
        for which in (0, 1):
            times[which].append(step_seconds(both[which]))
    stock, ours = (statistics.fmean(sorted(one)[20:-20]) for one in times)
    figures["screen_10000"] = round((ours - stock) / stock, 4)
    benchmark.pedantic(lambda: step_seconds(both[1]), rounds=20)
    assert figures["screen_10000"] < 0.15


def test_nothing_is_copied(figures: Figures) -> None:
    import schedloom

    files = Path(schedloom.__file__).parent.rglob("*.py")
    figures["copied_statements"] = sum(copied_runs(file.read_text()) for file in files)
    assert figures["copied_statements"] == 0
