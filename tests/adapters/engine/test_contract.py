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


MOONCAKE = [
    ("MooncakeConnectorV1", [30008, 30012], [30000, 30000]),
    ("MooncakeHybridConnector", [30008, 30012], [30000, 30000]),
    ("MooncakeConnectorV2", [30018, 30019], [30004, 30004]),
    ("MooncakePullConnector", [30018, 30019], [30004, 30004]),
    ("MooncakeLayerwiseConnector", [30004, 30006], [30000, 30000]),
]
"""Where ranks 2 and 3 of 4 have their ports behind 30000, each of 2 x 2 workers (tensor, pipeline), with experts and
without: a fake of vllm-ascend's connectors, by what the scheduler sides of 0.30.0rc2 add to ``kv_port``."""


@pytest.mark.parametrize(("connector", "with_experts", "without"), MOONCAKE)
@pytest.mark.parametrize("combined", [False, True])
def test_where_vllm_ascends_connectors_are_reached(
    model: Path, monkeypatch: pytest.MonkeyPatch, connector: str, with_experts: Any, without: Any, combined: bool
) -> None:
    """SEC-1."""
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.7")
    config = vllm_config(model)
    config.kv_transfer_config = mooncake(connector, combined)
    parallel = config.parallel_config
    parallel.data_parallel_size, parallel.data_parallel_size_local, parallel.data_parallel_index = 4, 2, 2
    parallel.data_parallel_hybrid_lb = True
    parallel.tensor_parallel_size = parallel.pipeline_parallel_size = 2
    for is_moe, ports in ((True, with_experts), (False, without)):
        monkeypatch.setattr(type(config.model_config), "is_moe", is_moe)
        endpoints = describe_engine(config).kv_endpoints
        assert [(one.engine_id, one.port) for one in endpoints] == [("m_dp2", ports[0]), ("m_dp3", ports[1])]
        assert {(one.host, one.tp_size, one.pp_size) for one in endpoints} == {("10.0.0.7", 2, 2)}


def mooncake(connector: str, combined: bool) -> KVTransferConfig:
    child = {"kv_connector": connector, "kv_role": "kv_producer", "kv_port": "30000"}
    if not combined:
        return KVTransferConfig(**child, engine_id="m")
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_producer",
        engine_id="m",
        kv_connector_extra_config={"connectors": [OFFLOAD, child]},
    )


@pytest.mark.parametrize(("connector", "_", "__"), MOONCAKE)
@pytest.mark.parametrize("change", [{"nnodes": 2}, {"distributed_executor_backend": "ray"}, {}])
def test_where_workers_on_other_machines_are_reached_is_not_told(
    model: Path, change: dict[str, Any], connector: str, _: Any, __: Any
) -> None:
    config = vllm_config(model)
    config.kv_transfer_config = mooncake(connector, combined=False)
    for name, value in change.items():
        setattr(config.parallel_config, name, value)
    names_workers = connector in ("MooncakeConnectorV1", "MooncakeHybridConnector")
    assert (describe_engine(config).kv_endpoints == []) is bool(change and names_workers)


def test_a_port_of_a_combined_connector_is_its_own(model: Path) -> None:
    config = vllm_config(model)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_producer",
        kv_port=30000,
        kv_connector_extra_config={"connectors": [{"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer"}]},
    )
    assert [one.port for one in describe_engine(config).kv_endpoints] == [KVTransferConfig.kv_port]


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
