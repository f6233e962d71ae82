"""What the connector counts, for vLLM's log and for Prometheus."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

EVENTS = {
    "saves": "saves that are complete",
    "restores": "requests that went on from their saved KV",
    "refused_no_capacity": "not saved: host memory was full",
    "refused_no_tokens": "not saved: nothing was computed yet",
    "refused_no_reading": "not saved: the request may not read cached KV",
    "refused_unsupported_cache": "not saved: the model has a cache that cannot be saved exactly",
    "refused_context_parallel": "not saved: a block is spread over several workers",
    "fallback_save_failed": "recomputed: a worker could not save",
    "fallback_save_timed_out": "recomputed: a save was not reported in time",
    "fallback_load_failed": "recomputed or ended in an error, as vLLM is configured: a worker could not load",
    "fallback_discarded": "recomputed: the prefix cache was reset",
    "superseded": "saved KV that was not needed: the prefix cache or another connector had it",
    "dropped": "saved KV of a request that ended before it was restored",
}
BYTES = {"saved_bytes": "bytes copied to host memory", "restored_bytes": "bytes copied back"}


class OffloadCounters:
    """Counts since the engine started (``total``), and since the counts were last taken."""

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self._recent: Counter[str] = Counter()

    def count(self, name: str, amount: int = 1) -> None:
        self.total[name] += amount
        self._recent[name] += amount

    def take(self) -> OffloadStats | None:
        if not self._recent:
            return None
        recent, self._recent = self._recent, Counter()
        return OffloadStats(data=dict(recent))


class OffloadStats(KVConnectorStats):
    """Counts of one interval. They are the engine's: workers count nothing."""

    data: dict[str, int]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: OffloadStats) -> OffloadStats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"preempt_offload_{name}": amount for name, amount in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class OffloadMetrics(KVConnectorPromMetrics):
    """The counts on the engine's own ``/metrics``, named so that vLLM unregisters them together with its own."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], labels: dict[int, list[Any]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labels)
        self._events = self._counter_cls(
            name="vllm:schedloom_preempt_offload_events",
            documentation="What became of the KV of preempted requests.",
            labelnames=[*labelnames, "event"],
        )
        self._bytes = self._counter_cls(
            name="vllm:schedloom_preempt_offload_bytes",
            documentation="KV of preempted requests copied to host memory and back, over all workers.",
            labelnames=[*labelnames, "direction"],
        )

    def observe(self, transfer_stats_data: dict[str, int], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, amount in transfer_stats_data.items():
            if name in BYTES:
                self._bytes.labels(*labels, name.removesuffix("_bytes")).inc(amount)
            else:
                self._events.labels(*labels, name).inc(amount)
