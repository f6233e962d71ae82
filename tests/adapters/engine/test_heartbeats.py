"""R6: which leases a Decoder's heartbeat renews at a Prefiller that writes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker

from schedloom.adapters.engine import heartbeats
from schedloom.router.requests.call import new_request_id

GIVEN, OTHER = new_request_id(), new_request_id()
KEPT = f"cmpl-{GIVEN}-0-1a2b3c4d"
"""What vLLM 0.32 makes of an id that it is given."""


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """The connector's class, loaded by vLLM's own factory in a process that has the plug-in."""
    with monkeypatch.context() as patched:
        for owner, name in (
            (KVConnectorFactory, "get_connector_class"),
            (NixlPushConnectorWorker, "_handle_heartbeat"),
        ):
            patched.setattr(owner, name, getattr(owner, name))
        heartbeats.install()
        heartbeats.install()
        yield KVConnectorFactory.get_connector_class(
            KVTransferConfig(kv_connector=heartbeats.CONNECTOR, kv_role="kv_producer")
        )


def renewed(kept: list[str], payload: str, worker_class: type = NixlPushConnectorWorker) -> list[str]:
    worker: Any = object.__new__(worker_class)
    worker._lease_extension = 20
    worker._reqs_to_send = dict.fromkeys(kept, over := time.perf_counter() + 1)
    worker._handle_heartbeat(payload)
    return [one for one, until in worker._reqs_to_send.items() if until > over]


@pytest.mark.parametrize("kept", [KEPT, f"chatcmpl-{GIVEN}-1a2b3c4d"], ids=["completion", "chat"])
def test_a_request_is_known_by_what_the_router_gave(loaded: type, kept: str) -> None:
    assert renewed([kept, f"cmpl-{OTHER}-0-1a2b3c4d"], f"{new_request_id()},{GIVEN}") == [kept]


def test_a_request_is_known_by_its_whole_id(loaded: type) -> None:
    assert renewed([KEPT, "another"], f"another,{new_request_id()}") == ["another"]


def test_nobody_else_is_renewed(loaded: type) -> None:
    for payload in ("", "unknown", GIVEN[:-1], GIVEN[:8], OTHER):
        assert renewed([KEPT, "another"], payload) == []


def test_vllm_alone_knows_whole_ids_only() -> None:
    """If it knew more, this module would have nothing to do."""
    assert renewed([KEPT], KEPT, NixlBaseConnectorWorker) == [KEPT]
    assert renewed([KEPT], GIVEN, NixlBaseConnectorWorker) == []
