"""A7, B10: what an engine says of itself."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.config.kv_events import KVEventsConfig

from schedloom.adapters.engine.contract import describe_engine
from schedloom.core.wire import KvEndpoint
from tests.adapters.engine.harness import BLOCK, vllm_config

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
OFFLOAD = {"kv_connector": "PreemptOffloadConnector", "kv_role": "kv_producer"}
SHORT = {"kv_lease_duration": 7, "bidirectional_kv_xfer": True}


def transfer(connector: str, extra: dict[str, Any]) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=connector, kv_role="kv_producer", kv_connector_extra_config=extra)


@pytest.mark.parametrize(
    ("connector", "extra", "lease", "bidirectional", "saves"),
    [
        ("NixlConnector", {}, 30, False, False),
        ("NixlConnector", SHORT, 7, True, False),
        ("PreemptOffloadConnector", {}, None, False, True),
        ("MultiConnector", {"connectors": [{**NIXL, "kv_connector_extra_config": SHORT}, OFFLOAD]}, 7, True, True),
    ],
)
def test_what_its_connectors_promise(
    model: Path, connector: str, extra: dict[str, Any], lease: float | None, bidirectional: bool, saves: bool
) -> None:
    config = vllm_config(model)
    config.kv_transfer_config = transfer(connector, extra)
    contract = describe_engine(config, ["name"], "epoch")
    assert (contract.kv_lease_seconds, contract.bidirectional_kv) == (lease, bidirectional)
    assert contract.saves_preempted_kv is saves
    assert (contract.models, contract.block_size, contract.epoch) == (["name"], BLOCK, "epoch")


def test_where_its_connector_is_reached(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "7000")
    config = vllm_config(model)
    config.kv_transfer_config = transfer("NixlPushConnector", {})
    name = config.kv_transfer_config.engine_id
    assert describe_engine(config).kv_endpoints == [KvEndpoint(engine_id=name, host="10.0.0.1", port=7000)]
    config.parallel_config.data_parallel_size = 4
    config.parallel_config.data_parallel_size_local = 2
    config.parallel_config.data_parallel_hybrid_lb = True
    config.parallel_config.data_parallel_index = 2
    ranks = [(one.engine_id, one.port) for one in describe_engine(config).kv_endpoints]
    assert ranks == [(f"{name}_dp2", 7002), (f"{name}_dp3", 7003)]


@pytest.mark.parametrize(("size", "local", "backend"), [(4, 2, "mp"), (4, 0, "mp"), (2, 2, "ray")])
def test_where_ranks_on_other_machines_are_reached_is_not_told(
    model: Path, size: int, local: int, backend: str
) -> None:
    config = vllm_config(model)
    config.kv_transfer_config = transfer("NixlConnector", {})
    config.parallel_config.data_parallel_size = config.parallel_config.data_parallel_size_local = 2
    assert len(describe_engine(config).kv_endpoints) == 2
    config.parallel_config.data_parallel_size, config.parallel_config.data_parallel_size_local = size, local
    config.parallel_config.data_parallel_backend = backend
    assert describe_engine(config).kv_endpoints == []


@pytest.mark.parametrize(
    ("endpoints", "ports"),
    [
        ({"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}, (5559, 6559)),
        ({"endpoint": "tcp://*:5557"}, (5559, None)),
        ({"endpoint": "tcp://collector:5557"}, (None, None)),
        ({"endpoint": "tcp://*:0"}, (None, None)),
        ({"publisher": "null"}, (None, None)),
        (None, (None, None)),
    ],
)
def test_where_it_tells_of_its_blocks(
    model: Path, endpoints: dict[str, Any] | None, ports: tuple[int | None, int | None]
) -> None:
    config = vllm_config(model)
    config.parallel_config.data_parallel_index = 2
    if endpoints is not None:
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, **endpoints)
    contract = describe_engine(config)
    assert (contract.kv_events_port, contract.kv_replay_port) == ports


@pytest.mark.parametrize(("extra", "seconds"), [({}, None), (SHORT, 480), ({**SHORT, "decoder_kv_blocks_ttl": 9}, 9)])
def test_how_long_a_decoder_pins_a_turn(model: Path, extra: dict[str, Any], seconds: float | None) -> None:
    config = vllm_config(model)
    config.kv_transfer_config = transfer("NixlConnector", extra)
    assert describe_engine(config).kv_pinned_seconds == seconds
