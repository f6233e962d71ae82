"""A7, B10: what an engine says of itself."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from schedloom.adapters.engine.contract import describe_engine
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
