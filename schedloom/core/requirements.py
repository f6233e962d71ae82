"""Whether an engine offers what its policies need."""

from __future__ import annotations

from collections.abc import Iterable

from schedloom.core.errors import ConfigurationError
from schedloom.core.policy import Policy, Requirements
from schedloom.core.wire import EngineContract


def check_requirements(policies: Iterable[Policy], engine: EngineContract) -> None:
    """Raises ConfigurationError with one sentence for the first policy whose needs ``engine`` does not meet."""
    for policy in policies:
        complaint = _complaint(policy.requires, engine)
        if complaint:
            raise ConfigurationError(f"policy {policy.name!r} {complaint}, or switch the policy off for this engine")


def _complaint(needs: Requirements, engine: EngineContract) -> str | None:
    if needs.decoder and not engine.can_decode:
        return (
            f"runs on Decoders only and this engine's KV role is {engine.role.value!r}: "
            'give it "kv_role": "kv_consumer" in --kv-transfer-config'
        )
    if needs.prefix_caching and not engine.prefix_caching:
        return "needs the prefix cache: start the engine with --enable-prefix-caching"
    if needs.preempted_kv and not engine.saves_preempted_kv:
        return (
            "needs a KV connector that saves preempted requests: name PreemptOffloadConnector in --kv-transfer-config, "
            "alone or among the connectors of a MultiConnector"
        )
    if needs.chunked_prefill and not engine.chunked_prefill:
        return "cuts prompts into chunks: start the engine with --enable-chunked-prefill"
    return None
