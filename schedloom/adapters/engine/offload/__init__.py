"""A KV connector that keeps the KV of preempted requests in host memory. See docs/preempt-offload.md."""

from __future__ import annotations

import contextlib

CONNECTOR = "PreemptOffloadConnector"


def install() -> None:
    """Make the connector known to vLLM by its name. May be called any number of times in one process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(CONNECTOR, f"{__name__}.connector", CONNECTOR)
