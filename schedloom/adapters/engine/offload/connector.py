"""The connector as vLLM knows it: one object in the scheduler, one in every worker."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from schedloom.adapters.engine.offload import layout
from schedloom.adapters.engine.offload.metadata import OffloadMetadata, SaveReport
from schedloom.adapters.engine.offload.scheduler_side import Observer, OffloadScheduler
from schedloom.adapters.engine.offload.settings import OffloadSettings, read_settings
from schedloom.adapters.engine.offload.slots import HostSlots
from schedloom.adapters.engine.offload.stats import OffloadMetrics, OffloadStats
from schedloom.adapters.engine.offload.worker_side import OffloadWorker

logger = logging.getLogger("vllm.schedloom")


class PreemptOffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV of preempted requests in host memory. Works alone and as a child of vLLM's ``MultiConnector``.

    ``update_state_before_preempt``, ``has_preempted_request`` and ``discard_preempted`` are for the scheduler that
    preempts; everything else is vLLM's interface.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        num_workers = vllm_config.parallel_config.world_size
        slot_bytes = layout.block_bytes(kv_cache_config)
        num_slots = int(settings.host_bytes) // num_workers // slot_bytes if slot_bytes else 0
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = _scheduler_side(vllm_config, kv_cache_config, settings, num_slots, slot_bytes)
            self._warn(num_slots)
        else:
            self._worker = OffloadWorker(kv_cache_config, num_slots)

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody waits for what is saved here."""
        return False

    @property
    def counters(self) -> Counter[str]:
        """What has happened since the engine started: see ``stats.EVENTS``."""
        return self._scheduler.counters.total

    # For the scheduler that preempts

    def update_state_before_preempt(
        self, request: Any, block_ids: tuple[list[int], ...], num_computed_tokens: int
    ) -> bool:
        """Take on a request that is about to be preempted; False when its KV cannot be saved."""
        return self._scheduler.take(request, block_ids, num_computed_tokens)

    def has_preempted_request(self, request_id: str) -> bool:
        return self._scheduler.holds(request_id)

    def discard_preempted(self) -> None:
        """The KV of all preempted requests has become invalid."""
        self._scheduler.discard()

    def observe_preempted(self, observer: Observer) -> None:
        """Tell ``observer`` of every save and restore."""
        self._scheduler.observer = observer

    # vLLM's scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.bind(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.restorable(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.has_pins()

    def build_connector_meta(self, scheduler_output: Any) -> OffloadMetadata:
        return self._scheduler.orders()

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, SaveReport):
            self._scheduler.reported(report)
        failed = connector_output.failed_recving or ()
        for request_id in connector_output.finished_recving or ():
            self._scheduler.loaded(request_id, request_id in failed)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def reset_cache(self) -> bool:
        return self._scheduler.discard()

    # vLLM's worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: OffloadMetadata) -> None:
        self._worker.save(kv_connector_metadata.saves)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata: OffloadMetadata = self._get_connector_metadata()
        self._worker.save(metadata.saves)
        self._worker.load(metadata.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request waits until all of its layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved while it is computed."""

    def wait_for_save(self) -> None:
        """Blocks keep a reference until their save is reported."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        over, failed = self._worker.take_loaded()
        return KVConnectorTransferResults(finished_recving=over, failed_recving=failed)

    def build_connector_worker_meta(self) -> SaveReport | None:
        return self._worker.take_report()

    # Statistics

    def get_kv_connector_stats(self) -> OffloadStats | None:
        return self._scheduler.counters.take() if self.role == KVConnectorRole.SCHEDULER else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OffloadStats:
        return OffloadStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[Any]]
    ) -> OffloadMetrics:
        return OffloadMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _warn(self, num_slots: int) -> None:
        if reason := self._scheduler.obstacle:
            logger.warning("PreemptOffloadConnector saves nothing here: %s", reason.replace("_", " "))
        elif not num_slots:
            logger.warning("PreemptOffloadConnector saves nothing: host_bytes is less than one block for each worker")


def _scheduler_side(
    vllm_config: Any, kv_cache_config: Any, settings: OffloadSettings, num_slots: int, slot_bytes: int
) -> OffloadScheduler:
    return OffloadScheduler(
        block_sizes=[group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups],
        slots=HostSlots(num_slots),
        slot_bytes=slot_bytes,
        num_workers=vllm_config.parallel_config.world_size,
        timeout_seconds=settings.save_timeout_seconds,
        obstacle=layout.obstacle(kv_cache_config, vllm_config.parallel_config),
    )
