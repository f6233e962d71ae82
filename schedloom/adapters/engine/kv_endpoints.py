"""Where other engines reach this one's KV connector, worked out as the connector does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from schedloom.adapters.engine.connectors import connectors_of, port_of
from schedloom.core.wire import KvEndpoint

_Offset = Callable[[Any, int, int], int]


def _behind_the_workers_before(parallel: Any, rank: int, ranks: int) -> int:
    return rank * _workers(parallel)


def _behind_all_workers(parallel: Any, rank: int, ranks: int) -> int:
    return ranks * _workers(parallel) + rank


def _behind_the_tensor_ranks_before(parallel: Any, rank: int, ranks: int) -> int:
    return rank * int(parallel.tensor_parallel_size)


def _workers(parallel: Any) -> int:
    pipeline, context = parallel.pipeline_parallel_size, parallel.prefill_context_parallel_size
    return int(parallel.tensor_parallel_size * pipeline * context)


_MOONCAKE: Final[dict[str, _Offset]] = {
    "MooncakeConnectorV1": _behind_the_workers_before,
    "MooncakeHybridConnector": _behind_the_workers_before,
    "MooncakeConnectorV2": _behind_all_workers,
    "MooncakePullConnector": _behind_all_workers,
    "MooncakeLayerwiseConnector": _behind_the_tensor_ranks_before,
}
"""Where a rank's port lies behind ``kv_port``, with vllm-ascend 0.30.0rc2."""

_NAMES_WORKERS: Final = ("MooncakeConnectorV1", "MooncakeHybridConnector")
"""They tell where each worker of a rank is."""


def kv_endpoints(vllm_config: Any) -> list[KvEndpoint]:
    """In the order of ranks. Empty where some may be on other machines, whose hosts are not known here."""
    parallel = vllm_config.parallel_config
    names = connectors_of(vllm_config.kv_transfer_config)
    mooncake = next((name for name in names if name in _MOONCAKE), None)
    if _ranks_may_run_elsewhere(parallel):
        return []
    if any("Nixl" in name for name in names):
        return _of_nixl(vllm_config.kv_transfer_config.engine_id, parallel)
    if mooncake is None or (mooncake in _NAMES_WORKERS and _workers_may_run_elsewhere(parallel)):
        return []
    return _of_mooncake(mooncake, vllm_config)


def reachable_ranks(parallel: Any) -> int:
    """Data-parallel ranks behind this server; their header counts from 0 within it."""
    if parallel.data_parallel_external_lb:
        return 1
    if parallel.data_parallel_hybrid_lb:
        return int(parallel.data_parallel_size_local)
    return int(parallel.data_parallel_size)


def _of_nixl(engine_id: str, parallel: Any) -> list[KvEndpoint]:
    from vllm import envs

    tensor = max(parallel.tensor_parallel_size, parallel.decode_context_parallel_size)
    host, first = envs.VLLM_NIXL_SIDE_CHANNEL_HOST, envs.VLLM_NIXL_SIDE_CHANNEL_PORT
    return [_endpoint(engine_id, parallel, rank, host, first + rank, tensor) for rank in _ranks(parallel)]


def _of_mooncake(name: str, vllm_config: Any) -> list[KvEndpoint]:
    """Ranks of a model without experts know of no other ranks."""
    from vllm.utils.network_utils import get_ip

    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    host, first, tensor = get_ip(), port_of(transfer, name), parallel.tensor_parallel_size
    together = parallel.data_parallel_size if vllm_config.model_config.is_moe else 1
    offsets = [(rank, _MOONCAKE[name](parallel, rank % together, together)) for rank in _ranks(parallel)]
    return [_endpoint(transfer.engine_id, parallel, rank, host, first + offset, tensor) for rank, offset in offsets]


def _endpoint(engine_id: str, parallel: Any, rank: int, host: str, port: int, tensor: int) -> KvEndpoint:
    """Engine cores of several ranks put their rank behind the engine id."""
    name = f"{engine_id}_dp{rank}" if parallel.data_parallel_size > 1 else engine_id
    return KvEndpoint(engine_id=name, host=host, port=port, tp_size=tensor, pp_size=parallel.pipeline_parallel_size)


def _ranks(parallel: Any) -> range:
    first = parallel.data_parallel_index
    return range(first, first + reachable_ranks(parallel))


def _ranks_may_run_elsewhere(parallel: Any) -> bool:
    is_spread: bool = parallel.data_parallel_size > 1 and parallel.data_parallel_backend == "ray"
    return is_spread or reachable_ranks(parallel) > max(1, int(parallel.data_parallel_size_local))


def _workers_may_run_elsewhere(parallel: Any) -> bool:
    return bool(parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray")
