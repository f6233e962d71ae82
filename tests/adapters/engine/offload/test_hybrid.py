"""A9: a model with a sliding window beside full attention is restored exactly where its layers look.

vLLM's real scheduler and block pool with two cache groups; the model writes to every slot what belongs there, and looks
at everything that it would attend to.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an engine: install schedloom[cpu]")

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager

from schedloom.adapters.engine.offload import CONNECTOR, install
from schedloom.adapters.engine.offload.copier import BlockCopier
from schedloom.adapters.engine.offload.metadata import BlockCopies
from schedloom.adapters.engine.scheduler import composed
from schedloom.core.composition import PolicyChoice, compose
from tests.adapters.engine.harness import BLOCK, TOKEN, make_request, vllm_config

WINDOW = 3 * BLOCK + 5
NUM_BLOCKS = 40
SHAPE = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
SPECS = (FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=WINDOW))
POLICY = PolicyChoice(name="offload_restore", **{"min_saved_tokens": 1})


class HybridBench:
    """One batch at a time. ``caches[group][block, offset]`` holds the number of the token that was written there."""

    def __init__(self, model: Path) -> None:
        install()
        config = vllm_config(model, role=None)
        config.kv_transfer_config = KVTransferConfig(
            kv_connector=CONNECTOR, kv_role="kv_consumer", kv_connector_extra_config={"host_bytes": "64MiB"}
        )
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(SPECS)]
        self.scheduler: Any = composed(Scheduler, compose([POLICY]))(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.caches = [torch.full((NUM_BLOCKS, BLOCK), -1) for _ in SPECS]
        self.worker = KVConnectorFactory.create_connector(
            config=config, role=KVConnectorRole.WORKER, kv_cache_config=self.scheduler.kv_cache_config
        )
        self.worker.register_kv_caches({f"layer {number}": cache for number, cache in enumerate(self.caches)})
        self.wrong: set[str] = set()
        self.attended_outside_the_first_blocks = 0

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        self.worker.handle_preemptions(scheduled.kv_connector_metadata)
        self.worker.bind_connector_metadata(scheduled.kv_connector_metadata)
        for name, count in scheduled.num_scheduled_tokens.items():
            self._compute(name, count)
        self.worker.start_load_kv(None)
        results = self.worker.get_transfer_results(scheduled.finished_req_ids)
        transferred = KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        names = list(scheduled.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[self._sample(name) for name in names],
            pooler_output=[],
            kv_connector_output=transferred,
        )
        self.scheduler.update_from_output(scheduled, result)

    def _compute(self, name: str, count: int) -> None:
        """``num_computed_tokens`` has been advanced by ``count`` already."""
        end = self.scheduler.requests[name].num_computed_tokens
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        for spec, slots, table in zip(SPECS, self.caches, tables, strict=True):
            slots[places(table, end - count, end)] = written(name)[end - count : end]
            first = max(0, end - count - getattr(spec, "sliding_window", end) + 1) if spec is SPECS[1] else 0
            self.attended_outside_the_first_blocks += first >= BLOCK
            if not torch.equal(slots[places(table, first, end)], written(name)[first:end]):
                self.wrong.add(name)

    def _sample(self, name: str) -> list[int]:
        return [] if self.scheduler.requests[name].is_prefill_chunk else [TOKEN]


@cache
def written(name: str) -> Any:
    """The numbers of a request's tokens."""
    chance = random.Random(name)
    return torch.tensor([chance.randrange(1 << 40) for _ in range(NUM_BLOCKS * BLOCK)])


def places(table: list[int], first: int, end: int) -> tuple[Any, Any]:
    """Block and offset of each position from ``first`` up to ``end``."""
    positions = torch.arange(first, end)
    return torch.tensor(table)[positions // BLOCK], positions % BLOCK


@pytest.fixture
def bench(model: Path) -> HybridBench:
    made = HybridBench(model)
    for number in range(5):
        prompt = [number * 1000 + place for place in range(60 + 9 * number)]
        made.scheduler.add_request(make_request(f"r{number}", prompt, max_tokens=90))
    return made


def drain(bench: HybridBench) -> None:
    for _ in range(2000):
        if not bench.scheduler.has_requests():
            return
        bench.step()
    raise AssertionError("requests are left")


def test_both_groups_are_restored_where_they_are_looked_at(bench: HybridBench) -> None:
    drain(bench)
    assert bench.wrong == set()
    assert bench.scheduler.connector.counters["restores"] >= 3
    assert bench.attended_outside_the_first_blocks
    pool = bench.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1
    assert bench.scheduler.connector._scheduler.slots.num_free == bench.scheduler.connector._scheduler.slots.count


@pytest.mark.parametrize("group", [0, 1])
def test_the_bench_sees_a_group_that_is_not_restored(
    bench: HybridBench, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    load = BlockCopier.load

    def one_group_only(self: BlockCopier, copies: BlockCopies) -> None:
        if copies.group != group:
            load(self, copies)

    monkeypatch.setattr(BlockCopier, "load", one_group_only)
    drain(bench)
    assert bench.wrong != set()
