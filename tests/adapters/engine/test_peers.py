"""A4: data-parallel ranks hear of each other's load, and nothing depends on it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schedloom.adapters.engine import peers
from schedloom.adapters.engine.peers import INTERVAL_SECONDS, SLOT_BYTES, LoadBoard
from schedloom.adapters.engine.scheduler import composed
from schedloom.core.composition import compose
from tests.adapters.engine.conftest import Make, choose
from tests.adapters.engine.harness import FakeRunner, make_request, make_scheduler, stock_class, tokens, vllm_config
from tests.adapters.engine.scenarios import cold_attempt, preempted_attempt, warm_attempt


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def boards(folder: Path, count: int = 2) -> tuple[Clock, list[LoadBoard]]:
    clock = Clock()
    return clock, [LoadBoard(folder / "board", rank, clock) for rank in range(count)]


def test_a_rank_hears_the_others_and_their_age(tmp_path: Path) -> None:
    clock, (first, second, _silent) = boards(tmp_path, 3)
    first.publish(3, 1, 8, 0.5)
    second.publish(8, 0, 8, 0.25)
    clock.now += 0.5
    (heard,) = first.peers()
    assert (heard.rank, heard.running, heard.waiting, heard.max_running, heard.kv_usage) == (1, 8, 0, 8, 0.25)
    assert heard.age == pytest.approx(0.5)


def test_writes_and_reads_are_rare_except_for_the_last_word(tmp_path: Path) -> None:
    clock, (first, second) = boards(tmp_path)
    second.publish(5, 0, 8, 0.5)
    assert first.peers()[0].running == 5
    second.publish(6, 0, 8, 0.5)
    clock.now += INTERVAL_SECONDS
    assert first.peers()[0].running == 5, "written too early"
    second.publish(7, 0, 8, 0.5)
    assert first.peers()[0].running == 5, "read too early"
    second.publish(0, 0, 8, 0.5)
    clock.now += INTERVAL_SECONDS
    assert first.peers()[0].running == 0, "a rank that falls idle says so at once"


@pytest.mark.parametrize("damage", [b"", b"\0" * SLOT_BYTES * 2, b"\xff" * 200, b"x"])
def test_a_damaged_board_is_silence(tmp_path: Path, damage: bytes) -> None:
    _, (first, second) = boards(tmp_path)
    second.publish(5, 0, 8, 0.5)
    (tmp_path / "board").write_bytes(damage)
    assert first.peers() == []


def test_a_slot_from_before_a_reboot_is_silence(tmp_path: Path) -> None:
    clock, (first, second) = boards(tmp_path)
    second.publish(5, 0, 8, 0.5)
    clock.now = 3.0
    assert first.peers() == []


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "board").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="board"):
        LoadBoard(tmp_path / "board", 0)
    assert not (tmp_path / "elsewhere").exists()


def test_only_the_user_can_read_it(tmp_path: Path) -> None:
    boards(tmp_path)
    assert (tmp_path / "board").stat().st_mode & 0o777 == 0o600


@pytest.fixture
def ranks(
    model: Path, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[FakeRunner]]:
    """Two ranks of one group."""
    monkeypatch.setattr(peers, "_memory", lambda: tmp_path)
    monkeypatch.setattr(peers, "INTERVAL_SECONDS", 0.0)

    def build(rank: int) -> FakeRunner:
        config = vllm_config(model, asynchronous=asynchronous, role=None, max_num_seqs=4)
        config.parallel_config.data_parallel_size = 2
        config.parallel_config.data_parallel_rank = rank
        config.parallel_config.data_parallel_master_port = 4711
        cls = composed(stock_class(asynchronous), compose([choose("balance", max_hold_seconds=30, stale_seconds=30)]))
        return FakeRunner(make_scheduler(cls, config), asynchronous)

    runners = [build(rank) for rank in range(2)]
    yield runners
    for runner in runners:
        runner.scheduler.shutdown()
    assert os.listdir(tmp_path) == []


def add(runner: FakeRunner, name: str, max_tokens: int = 30) -> None:
    runner.scheduler.add_request(make_request(name, tokens(len(name), 40), max_tokens))


def running(runner: FakeRunner) -> list[Any]:
    return [request.request_id for request in runner.scheduler.running]


def test_a_rank_admits_nobody_while_its_peer_is_full(ranks: list[FakeRunner]) -> None:
    first, second = ranks
    for index in range(4):
        add(second, f"r{index}")
    second.steps(3)
    add(first, "held")
    first.steps(5)
    assert running(first) == []
    second.drain()
    first.steps(2)
    assert running(first) == ["held"]
    first.drain()


def test_a_hold_ends_when_its_time_is_over(ranks: list[FakeRunner]) -> None:
    first, second = ranks
    now = [0.0]
    first.scheduler.view.clock = lambda: now[0]
    for index in range(4):
        add(second, f"r{index}")
    second.steps(3)
    add(first, "held")
    for now[0] in range(0, 31, 5):
        assert running(first) == []
        first.step()
    assert running(first) == ["held"]
    first.drain()
    second.drain()


def test_what_runs_goes_on_during_a_hold(ranks: list[FakeRunner]) -> None:
    first, second = ranks
    add(first, "stream")
    first.steps(3)
    for index in range(4):
        add(second, f"r{index}", max_tokens=400)
    second.steps(3)
    add(first, "held")
    for _ in range(40):
        first.step()
        second.step()
    assert first.ended == {"stream": ("length", None)}
    second.drain()
    first.drain()
    assert "held" in first.ended


def test_a_board_that_cannot_be_opened_leaves_vllms_own_behaviour(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_memory", lambda: tmp_path / "missing")
    config = vllm_config(model, role=None)
    config.parallel_config.data_parallel_size = 2
    scheduler = make_scheduler(composed(stock_class(False), compose([choose("balance")])), config)
    runner = FakeRunner(scheduler, asynchronous=False)
    add(runner, "one")
    runner.drain()
    assert runner.ended == {"one": ("length", None)}


@pytest.mark.parametrize("reverse", [False, True])
def test_alone_on_its_host_and_together_with_others(make: Make, reverse: bool) -> None:
    names = ["append_prefill", "balance", "kv_lease", "phase_separation"][:: -1 if reverse else 1]
    assert make(*names).scheduler.view.peers == ()
    assert cold_attempt(make(*names)) == []
    assert warm_attempt(make(*names)) == []
    assert preempted_attempt(make(*names, num_blocks=50)) == []
