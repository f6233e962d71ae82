"""Whether an engine offers what its policies need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from schedloom.core.claims import QUEUE_ORDER
from schedloom.core.errors import ConfigurationError
from schedloom.core.hooks import hooks_of
from schedloom.core.policy import Policy, Requirements
from schedloom.core.wire import EngineContract


def check_requirements(policies: Iterable[Policy], engine: EngineContract) -> None:
    """Raises ConfigurationError with one sentence for the first policy whose needs ``engine`` does not meet."""
    for complaint in unmet(policies, engine):
        raise ConfigurationError(complaint)


def unmet(policies: Iterable[Policy], engine: EngineContract) -> Iterator[str]:
    """One sentence for each policy whose needs ``engine`` does not meet."""
    for policy in policies:
        complaint = _complaint(policy.requires, engine)
        if complaint:
            yield f"policy {policy.name!r} {complaint}, or switch the policy off for this engine"


def check_queue_order(policies: Iterable[Policy], scheduling_policy: str) -> None:
    """Raises ConfigurationError where both a policy and vLLM itself would order the waiting queue."""
    for complaint in twice_ordered(policies, scheduling_policy):
        raise ConfigurationError(complaint)


def twice_ordered(policies: Iterable[Policy], scheduling_policy: str) -> Iterator[str]:
    """One sentence for each policy that would order the waiting queue beside vLLM itself."""
    for policy in policies:
        if "queue_key" in hooks_of(type(policy)) and scheduling_policy != "fcfs":
            yield (
                f"policy {policy.name!r} and --scheduling-policy {scheduling_policy} both decide {QUEUE_ORDER}: "
                "drop one of the two"
            )


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
