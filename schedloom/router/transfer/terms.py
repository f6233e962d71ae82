"""What one engine may tell another through the router: known keys, bounded values, and addresses of its own."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import itemgetter
from typing import Any, Final, NamedTuple

from schedloom.core.wire import MOST_WORKERS, EngineContract, KvEndpoint
from schedloom.router.failures import Failure
from schedloom.router.fleet.worker import Target, Worker
from schedloom.router.telemetry.metrics import Metrics
from schedloom.router.transfer.parameters import Parameters

log = logging.getLogger(__name__)

_Check = Callable[[Any], bool]

_LONGEST: Final = 512
_MOST_BLOCKS: Final = 2**20
_MOST_GROUPS: Final = 1024
_SHOWN: Final = 64


def _is_flag(value: Any) -> bool:
    return value is True or value is False or value is None


def _is_text(value: Any) -> bool:
    return value is None or (isinstance(value, str) and len(value) <= _LONGEST)


def _is_size(value: Any) -> bool:
    """Of a group of workers, each of which others may connect to."""
    return value is None or (type(value) is int and 0 < value <= MOST_WORKERS)


def _is_port(value: Any) -> bool:
    return value is None or (type(value) is int and 0 < value < 2**16)


def _is_count(value: Any) -> bool:
    return value is None or (type(value) is int and 0 <= value < 2**31)


def _is_instant(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and -(2**53) < value < 2**53)


def _are_blocks(value: Any) -> bool:
    """Numbers of blocks, for each group of layers or for all of them."""
    if not isinstance(value, list):
        return value is None
    try:
        if not (value and isinstance(value[0], list)):
            return len(array("I", value)) <= _MOST_BLOCKS
        if len(value) > _MOST_GROUPS or not all(map(_is_list, value)):
            return False
        return sum([len(array("I", group)) for group in value]) <= _MOST_BLOCKS
    except (TypeError, OverflowError):
        return False


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _are_counts(value: Any) -> bool:
    return _is_count(value) or (isinstance(value, list) and len(value) <= _MOST_GROUPS and all(map(_is_count, value)))


def _are_nodes(value: Any) -> bool:
    if not isinstance(value, dict):
        return value is None
    return len(value) <= MOST_WORKERS and all(map(_is_text, value)) and all(map(_is_node, value.values()))


def _is_node(value: Any) -> bool:
    return isinstance(value, dict) and all(key in _OF_NODES and _OF_NODES[key](told) for key, told in value.items())


def _is_anything_small(value: Any) -> bool:
    return isinstance(value, bool) or _is_text(value) or _is_instant(value) or _are_counts(value)


_OF_NODES: dict[str, _Check] = {"host": _is_text, "engine_id": _is_text, "handshake_port": _is_port}

_NODES: Final = "remote_multi_nodes_meta_mapping"

_KNOWN: dict[str, _Check] = {
    **dict.fromkeys(("do_remote_prefill", "do_remote_decode", "do_virtual"), _is_flag),
    **dict.fromkeys(("remote_engine_id", "remote_request_id", "request_id", "transfer_mode", "remote_host"), _is_text),
    **dict.fromkeys(("remote_port", "remote_te_rpc_port"), _is_port),
    **dict.fromkeys(("tp_size", "pp_size", "dcp_size", "remote_tp_size"), _is_size),
    **dict.fromkeys(("remote_ptp_size", "remote_pcp_size", "remote_dcp_size"), _is_size),
    **dict.fromkeys(("remote_num_tokens", "remote_cached_tokens", "remote_prefill_cached_tokens"), _is_count),
    **dict.fromkeys(("num_prompt_blocks", "remote_num_prompt_tokens", "last_token_id"), _is_count),
    **dict.fromkeys(("remote_block_ids", "token_ids"), _are_blocks),
    "remote_block_size": _are_counts,
    "remote_blocks_expiry_time": _is_instant,
    _NODES: _are_nodes,
}
"""What vLLM 0.32 tells with its NIXL connectors, and vllm-ascend 0.30.0rc2 with its Mooncake connectors."""


_OF_REQUESTS: Final = frozenset(
    {key for key, check in _KNOWN.items() if check in (_are_blocks, _is_count, _is_instant)}
    | {"remote_request_id", "request_id"}
)
"""What is different for every request."""


class _Known(NamedTuple):
    """What one rank told last: most of it it tells every time."""

    contract: EngineContract
    keys: tuple[str, ...]
    get: Callable[[Parameters], tuple[Any, ...]]
    values: tuple[Any, ...]
    of_requests: tuple[tuple[str, _Check], ...]

    def stand(self, parameters: Parameters, contract: EngineContract) -> bool:
        """Whether ``parameters`` tell the same, and of their request nothing that is out of bounds."""
        known_of, keys, get, values, of_requests = self
        if contract is not known_of or tuple(parameters) != keys:
            return False
        for key, check in of_requests:
            if not check(parameters[key]):
                return False
        return get(parameters) == values


class Terms:
    """Holds engines to them. ``more_keys`` are of engines that tell more; ``suspect`` is called with an engine that
    names an address which is not its own: it may have been restarted elsewhere.
    """

    def __init__(self, more_keys: Iterable[str], metrics: Metrics, suspect: Callable[[Worker], None]) -> None:
        self._checks = {**dict.fromkeys(more_keys, _is_anything_small), **_KNOWN}
        self._metrics = metrics
        self._suspect = suspect

    def checked(self, parameters: Parameters, source: Target) -> Parameters:
        """``parameters`` that ``source`` told. Raises Failure (502) for those that no engine is to be told."""
        known: _Known | None = source.worker.told.get(source.rank)
        if known is not None and known.stand(parameters, source.worker.contract):
            return parameters
        complaint = self._misfit(parameters) or self._stranger(parameters, source)
        if complaint is None:
            self._remember(parameters, source)
            return parameters
        log.warning("%s told transfer parameters that are not passed on: %s", source.name, complaint)
        self._metrics.transfer_refusals.labels(source.name).inc()
        message = "An engine told transfer parameters that are not passed on; the router's log says why."
        failure = Failure.own(502, message, "bad_transfer_parameters")
        failure.culprit = source.worker
        raise failure

    def _remember(self, parameters: Parameters, source: Target) -> None:
        lasting = [key for key in parameters if key not in _OF_REQUESTS]
        if len(lasting) < 2:
            return
        of_requests = tuple((key, self._checks[key]) for key in parameters if key in _OF_REQUESTS)
        get = itemgetter(*lasting)
        source.worker.told[source.rank] = _Known(source.contract, tuple(parameters), get, get(parameters), of_requests)

    def _misfit(self, parameters: Parameters) -> str | None:
        checks = self._checks
        for key, value in parameters.items():
            check = checks.get(key)
            if check is None:
                return f"the key {key[:_SHOWN]!r} is not known; transfer_keys may list it"
            if not check(value):
                return f"{key} is {repr(value)[:_SHOWN]}"
        return None

    def _stranger(self, parameters: Parameters, source: Target) -> str | None:
        endpoints = source.contract.kv_endpoints
        stranger = _stranger_to(endpoints, parameters) if endpoints else None
        if stranger is not None:
            self._suspect(source.worker)
        return stranger


def _stranger_to(endpoints: list[KvEndpoint], parameters: Parameters) -> str | None:
    """Who is named and is none of them."""
    host, port = parameters.get("remote_host"), parameters.get("remote_port")
    for one in endpoints:
        if one.port == port and one.host == host:
            break
    else:
        return f"{host}:{port} is none of its kv_endpoints"
    nodes = parameters.get(_NODES)
    return _strange_node(nodes, {one.host for one in endpoints}) if nodes else None


def _strange_node(nodes: Mapping[str, Mapping[str, Any]], hosts: Collection[str]) -> str | None:
    others = (node["host"] for node in nodes.values() if node.get("host") is not None)
    return next((f"{other} is the host of none of its kv_endpoints" for other in others if other not in hosts), None)
