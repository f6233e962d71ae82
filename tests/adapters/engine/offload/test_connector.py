"""A5, A6, A9: what an operator writes, what is refused and why, several workers, and what is counted."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an engine: install schedloom[cpu]")

import torch
from prometheus_client import Counter as PrometheusCounter
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from schedloom.adapters.engine.offload import CONNECTOR, install, layout
from schedloom.adapters.engine.offload.connector import PreemptOffloadConnector
from schedloom.adapters.engine.offload.metadata import SaveReport
from schedloom.adapters.engine.offload.scheduler_side import OffloadScheduler
from schedloom.adapters.engine.offload.settings import read_settings
from schedloom.adapters.engine.offload.slots import HostSlots
from schedloom.adapters.engine.offload.stats import EVENTS, OffloadCounters, OffloadMetrics, OffloadStats
from schedloom.adapters.engine.parts.recovery import preemption_stores
from schedloom.core.errors import ConfigurationError

BLOCK = 16


def test_sizes_are_read_as_people_write_them() -> None:
    assert read_settings({"host_bytes": "2GiB"}).host_bytes == 2 << 30
    assert read_settings({"host_bytes": 4096}).host_bytes == 4096


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({}, "PreemptOffloadConnector: kv_connector_extra_config.host_bytes is missing"),
        (
            {"host_byte": 1, "host_bytes": 1},
            "unknown key 'kv_connector_extra_config.host_byte'; did you mean 'host_bytes'",
        ),
        ({"host_bytes": "lots"}, "kv_connector_extra_config.host_bytes"),
        ({"host_bytes": 0}, "greater than 0"),
        ({"host_bytes": 1, "save_timeout_seconds": 0}, "kv_connector_extra_config.save_timeout_seconds"),
    ],
)
def test_a_wrong_setting_is_told_with_its_place(extra: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_settings(extra)
    assert sentence in str(refused.value)


def test_vllm_knows_it_by_name() -> None:
    install()
    install()
    assert KVConnectorFactory.get_connector_class_by_name(CONNECTOR) is PreemptOffloadConnector


def full(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **{"block_size": BLOCK, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32} | changes
    )


def config(*groups: tuple[Any, int]) -> Any:
    made = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer {n}" for n in range(count)]) for spec, count in groups
    ]
    return SimpleNamespace(kv_cache_groups=made)


WINDOW = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=64)
MAMBA = MambaSpec(block_size=BLOCK, shapes=((2, 8),), dtypes=(torch.float32,))
ALONE = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)


class PeculiarSpec(FullAttentionSpec):
    """A cache that keeps something elsewhere too."""


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([(full(), 4)], None),
        ([(full(), 2), (WINDOW, 2)], None),
        ([(full(), 2), (MAMBA, 2)], "unsupported_cache"),
        ([(PeculiarSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32), 1)], "unsupported_cache"),
    ],
)
def test_a_cache_that_cannot_be_saved_exactly_is_refused(groups: list[Any], reason: str | None) -> None:
    assert layout.obstacle(config(*groups), ALONE) == reason


def test_context_parallel_is_refused() -> None:
    spread = SimpleNamespace(decode_context_parallel_size=2, prefill_context_parallel_size=1)
    assert layout.obstacle(config((full(), 1)), spread) == "context_parallel"


def test_a_slot_holds_the_largest_block() -> None:
    assert layout.block_bytes(config((full(), 2), (WINDOW, 3))) == 3 * 2 * BLOCK * 2 * 8 * 4


@pytest.fixture
def books() -> OffloadScheduler:
    made = OffloadScheduler([BLOCK], HostSlots(6), 100, num_workers=2, timeout_seconds=30, obstacle=None)
    made.bind(BlockPool(20, enable_caching=True, hash_block_size=BLOCK))
    return made


def request(name: str = "r", **changes: Any) -> Any:
    return SimpleNamespace(**{"request_id": name, "num_tokens": 50, "skip_reading_prefix_cache": False} | changes)


def test_all_workers_must_have_saved(books: OffloadScheduler) -> None:
    blocks = books._pool.get_new_blocks(3)
    assert books.take(request(), ([block.block_id for block in blocks],), 41)
    books._pool.free_blocks(blocks)
    (order,) = books.orders().saves
    assert books.orders().saves == []
    books.reported(SaveReport({order.number: 1}))
    assert books.has_pins() and books.restorable(request(), 0) == (None, False)
    assert books._pool.get_num_free_blocks() == 16
    books.reported(SaveReport({order.number: 1}))
    assert not books.has_pins() and books.restorable(request(), 16) == (25, True)
    assert books._pool.get_num_free_blocks() == 19
    books.reported(SaveReport({order.number: 2}))
    assert books.counters.total == {"saves": 1, "saved_bytes": 3 * 100 * 2}


def test_a_failure_on_one_worker_is_a_failure(books: OffloadScheduler) -> None:
    blocks = books._pool.get_new_blocks(1)
    assert books.take(request(), ([blocks[0].block_id],), 5)
    (order,) = books.orders().saves
    books.reported(SaveReport({order.number: 2}, {order.number}))
    assert not books.has_pins() and not books.holds("r") and books.slots.num_free == 6


def test_a_dropped_save_is_never_ordered(books: OffloadScheduler) -> None:
    blocks = books._pool.get_new_blocks(1)
    assert books.take(request(), ([blocks[0].block_id],), 5)
    books.finished("r")
    assert books.orders().saves == []


@pytest.mark.parametrize(
    ("changes", "tokens", "blocks", "reason"),
    [
        ({}, 0, 1, "refused_no_tokens"),
        ({}, 97, 7, "refused_no_capacity"),
        ({"skip_reading_prefix_cache": True}, 16, 1, "refused_no_reading"),
    ],
)
def test_what_cannot_be_saved_is_refused(
    books: OffloadScheduler, changes: dict[str, Any], tokens: int, blocks: int, reason: str
) -> None:
    ids = [block.block_id for block in books._pool.get_new_blocks(blocks)]
    assert not books.take(request(**changes), (ids,), tokens)
    assert books.counters.total == {reason: 1} and reason in EVENTS
    assert not books.has_pins() and not books.holds("r") and books.slots.num_free == 6


def test_more_than_the_request_has_is_not_restored(books: OffloadScheduler) -> None:
    blocks = books._pool.get_new_blocks(1)
    books.take(request(), ([blocks[0].block_id],), 10)
    books.reported(SaveReport({books.orders().saves[0].number: 2}))
    assert books.restorable(request(num_tokens=10), 0) == (0, False)
    assert books.restorable(request(num_tokens=11), 0) == (10, True)
    assert books.restorable(request(num_tokens=11), 10) == (0, False)


def test_counts_travel_and_add_up() -> None:
    counters = OffloadCounters()
    assert counters.take() is None
    counters.count("saves")
    counters.count("saved_bytes", 100)
    first = counters.take()
    assert first is not None and counters.take() is None
    sent = pickle.loads(pickle.dumps(first.to_dict()))
    total = PreemptOffloadConnector.build_kv_connector_stats(sent).aggregate(OffloadStats(data={"saves": 2}))
    assert total.reduce() == {"preempt_offload_saves": 3, "preempt_offload_saved_bytes": 100}
    total.reset()
    assert total.is_empty()
    assert counters.total == {"saves": 1, "saved_bytes": 100}


def test_counts_are_on_the_metrics_page() -> None:
    counted = FakeMetric.made = {}
    vllm_config = SimpleNamespace(kv_transfer_config=None)
    types = dict.fromkeys((PrometheusCounter, *_others()), FakeMetric)
    OffloadMetrics(vllm_config, types, ["engine"], {0: ["0"]}).observe({"saves": 2, "saved_bytes": 100})
    assert counted == {
        ("vllm:schedloom_preempt_offload_events", ("0", "saves")): 2,
        ("vllm:schedloom_preempt_offload_bytes", ("0", "saved")): 100,
    }


def _others() -> tuple[type, ...]:
    from prometheus_client import Gauge, Histogram

    return Gauge, Histogram


class FakeMetric:
    """A Prometheus counter that tells what it was told."""

    made: dict[tuple[str, tuple[str, ...]], float]

    def __init__(self, name: str, documentation: str, labelnames: list[str]) -> None:
        self._name = name

    def labels(self, *values: str) -> Any:
        key = (self._name, values)
        return SimpleNamespace(inc=lambda amount: self.made.__setitem__(key, self.made.get(key, 0) + amount))


def test_of_several_stores_one_saves() -> None:
    """Two that both saved a victim would both hold its blocks and both restore it."""
    asked: list[str] = []

    def store(name: str) -> Any:
        return SimpleNamespace(update_state_before_preempt=lambda *victim: asked.append(name))

    several = SimpleNamespace(sub_connectors=[SimpleNamespace(), store("first"), store("second")])
    for found in preemption_stores(several):
        found.update_state_before_preempt()
    assert asked == ["first"]
    assert list(preemption_stores(None)) == []
