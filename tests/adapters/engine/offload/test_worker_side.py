"""A9: bytes that a worker saves are the bytes that it restores, whatever the cache looks like."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an engine: install schedloom[cpu]")

import torch

from schedloom.adapters.engine.offload import copier, host_memory
from schedloom.adapters.engine.offload.copier import BlockCopier, caches_by_block
from schedloom.adapters.engine.offload.lanes import StreamLane
from schedloom.adapters.engine.offload.metadata import BlockCopies, Job, SaveReport
from schedloom.adapters.engine.offload.worker_side import OffloadWorker

NUM_BLOCKS = 12
BLOCKS, SLOTS = [7, 2, 3, 9, 11], [0, 1, 5, 6, 3]


def dense(dtype: Any = torch.float32, blocks: int = NUM_BLOCKS) -> Any:
    return torch.arange(blocks * 2 * 4 * 6).reshape(blocks, 2, 4, 6).to(dtype)


def interleaved() -> Any:
    """Two layers whose blocks alternate in one memory: the first one's view skips the second's."""
    return torch.arange(NUM_BLOCKS * 2 * 48, dtype=torch.float32).reshape(NUM_BLOCKS, 2, 2, 4, 6)[:, 0]


LAYOUTS: dict[str, Callable[[], Any]] = {
    "dense": dense,
    "half": lambda: dense(torch.bfloat16),
    "eight bits": lambda: dense(torch.uint8),
    "heads first": lambda: dense().permute(0, 2, 1, 3),
    "kernel blocks": lambda: dense(blocks=3 * NUM_BLOCKS),
    "interleaved": interleaved,
    "keys and values apart": lambda: (dense(), dense() + 0.5),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("small", [False, True], ids=["one batch", "many"])
def test_a_save_and_a_load_elsewhere(monkeypatch: pytest.MonkeyPatch, layout: str, small: bool) -> None:
    if small:
        monkeypatch.setattr(copier, "STAGING_BYTES", 1000)
        monkeypatch.setattr(host_memory, "CHUNK_BYTES", 1000)
    caches = {"a": LAYOUTS[layout](), "b": dense() + 1000}
    views = caches_by_block(caches, ["a", "b"], NUM_BLOCKS)
    before = [view.clone() for view in views]
    made = BlockCopier([views], num_slots=8)
    made.save(BlockCopies(0, BLOCKS, SLOTS))
    for view in views:
        view.zero_()
    targets = [4, 8, 0, 1, 5]
    made.load(BlockCopies(0, targets, SLOTS))
    for view, old in zip(views, before, strict=True):
        assert torch.equal(view[targets], old[BLOCKS])
        untouched = sorted(set(range(NUM_BLOCKS)) - set(targets))
        assert not view[untouched].any()


def test_groups_of_different_sizes_share_the_slots() -> None:
    groups = [caches_by_block({"a": dense()}, ["a"], NUM_BLOCKS), caches_by_block({"b": dense(torch.uint8)}, ["b"], 12)]
    made = BlockCopier(groups, num_slots=2)
    made.save(BlockCopies(0, [3], [0]))
    made.save(BlockCopies(1, [5], [1]))
    expected = groups[0][0][3].clone(), groups[1][0][5].clone()
    made.load(BlockCopies(0, [1], [0]))
    made.load(BlockCopies(1, [2], [1]))
    assert torch.equal(groups[0][0][1], expected[0]) and torch.equal(groups[1][0][2], expected[1])


def test_memory_shared_by_layers_is_copied_once() -> None:
    cache = dense()
    assert len(caches_by_block({"a": cache, "b": cache}, ["a", "b", "absent"], NUM_BLOCKS)) == 1


def test_a_cache_that_has_no_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="the KV cache of a has 13 blocks where 12 or a multiple is due"):
        caches_by_block({"a": dense(blocks=13)}, ["a"], NUM_BLOCKS)


def test_host_memory_comes_in_pieces_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 400)
    memory = host_memory.HostMemory(num_slots=100, slot_bytes=100, pinned=False)
    assert memory.allocated_bytes == 0
    memory.write([0, 1], torch.ones(2, 100, dtype=torch.uint8))
    assert memory.allocated_bytes == 400
    memory.write([3, 4], torch.ones(2, 100, dtype=torch.uint8))
    assert memory.allocated_bytes == 800


def test_host_memory_is_not_larger_than_allowed() -> None:
    memory = host_memory.HostMemory(num_slots=3, slot_bytes=100, pinned=False)
    memory.write([2], torch.ones(1, 100, dtype=torch.uint8))
    assert memory.allocated_bytes == 300


class Lane:
    """Copies that are done when told."""

    def __init__(self) -> None:
        self.done = False

    def submit(self, work: Any) -> Any:
        work()
        return lambda: self.done


@pytest.fixture
def worker() -> OffloadWorker:
    group = SimpleNamespace(layer_names=["a"])
    made = OffloadWorker(SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=[group]), 8, lambda device: Lane())
    made.register({"a": dense()})
    return made


def job(number: int, name: str = "r") -> Job:
    return Job(number, name, [BlockCopies(0, [1, 2], [0, 1])])


def test_a_save_is_reported_once_and_when_it_is_done(worker: OffloadWorker) -> None:
    worker.save([job(1)])
    worker.save([job(1)])
    assert worker.take_report() is None
    worker._lane.done = True  # type: ignore[attr-defined]
    assert worker.take_report() == SaveReport({1: 1})
    worker.save([job(1)])
    assert worker.take_report() is None


def test_a_load_is_reported_once_and_when_it_is_done(worker: OffloadWorker) -> None:
    worker.load([job(1), job(2, "s")])
    assert worker.take_loaded() == (set(), set())
    worker._lane.done = True  # type: ignore[attr-defined]
    worker.load([job(1)])
    assert worker.take_loaded() == ({"r", "s"}, set())
    assert worker.take_loaded() == (set(), set())


def test_reports_of_workers_add_up() -> None:
    total = SaveReport({1: 1, 2: 1}).aggregate(SaveReport({1: 1}, {3}))
    assert total == SaveReport({1: 2, 2: 1}, {3})


def test_a_stream_waits_for_the_computation_and_copies_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, said = FakeStream(), []
    monkeypatch.setattr(torch, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"current of {device}")
    done = StreamLane("npu:0").submit(lambda: said.append(list(stream.calls)))
    assert said == [["wait for current of npu:0", "enter"]]
    assert stream.calls[2:] == ["leave", "record"]
    assert (done(), done()) == (False, True)


class FakeStream:
    """The part of torch's stream that lanes use."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def wait_stream(self, other: str) -> None:
        self.calls.append(f"wait for {other}")

    def __enter__(self) -> None:
        self.calls.append("enter")

    def __exit__(self, *error: object) -> None:
        self.calls.append("leave")

    def record_event(self) -> Any:
        self.calls.append("record")
        answers = iter([False, True])
        return SimpleNamespace(query=lambda: next(answers))
