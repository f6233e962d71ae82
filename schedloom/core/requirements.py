"""Whether an engine offers what its policies need."""

from __future__ import annotations

from collections.abc import Iterable

from schedloom.core.claims import QUEUE_ORDER, owned_by
from schedloom.core.errors import ConfigurationError
from schedloom.core.policy import Policy
from schedloom.core.wire import EngineContract


def check_requirements(policies: Iterable[Policy], engine: EngineContract) -> None:
    """Raises ConfigurationError with one sentence for the first policy whose needs ``engine`` does not meet."""
    for policy in policies:
        complaint = _complaint(policy, engine)
        if complaint:
            raise ConfigurationError(f"policy {policy.name!r} {complaint}, or switch the policy off for this engine")


def _complaint(policy: Policy, engine: EngineContract) -> str | None:
    needs = policy.requires
    if needs.decoder and not engine.can_decode:
        return (
            f"runs on Decoders only and this engine's KV role is {engine.role.value!r}: "
            'give it "kv_role": "kv_consumer" in --kv-transfer-config'
        )
    if needs.prefix_caching and not engine.prefix_caching:
        return "needs the prefix cache: start the engine with --enable-prefix-caching"
    if QUEUE_ORDER in owned_by(type(policy)) and engine.scheduling_policy != "fcfs":
        return (
            f"decides {QUEUE_ORDER}, and so does vLLM with --scheduling-policy {engine.scheduling_policy}: "
            "start the engine with --scheduling-policy fcfs"
        )
    return None
