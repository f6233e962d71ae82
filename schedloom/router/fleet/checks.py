"""What engines must have in common before the router puts KV of one into another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from schedloom.core.wire import DECLARED_EPOCH, EngineContract, Role
from schedloom.router.fleet.worker import APPEND_FEATURE, Worker
from schedloom.router.settings import OWNER_POLICY, RouterSettings, WorkerSettings
from schedloom.router.transfer.modes import CONNECTORS, Mode, families, mode_of, named, tells_nothing_spoken

Member = tuple[Worker, EngineContract]

KINDS = (("Prefiller", "prefill"), ("Decoder", "decode"))
"""Of each a fleet needs one; the second is its role in a configuration."""


def unnamed(kind: str, role: str, workers: Iterable[WorkerSettings]) -> str | None:
    """What to say where none of ``workers`` may be a ``kind``."""
    if any(worker.role in (None, role) for worker in workers):
        return None
    return f"no {kind} is configured; name one with --{role} URL beside the others, or under workers"


def none_can(kind: str, role: str) -> str:
    return f"none of the engines can be a {kind}; name one that can with --{role} URL, or under workers"


def all_drain(kind: str) -> str:
    return f"every {kind} that is there drains; take drain away from one of them under workers"


def complaint(newcomer: Member, others: Sequence[Member], settings: RouterSettings) -> str | None:
    """All ``complaints`` in one line, if there are any."""
    return "; besides, ".join(complaints(newcomer, others, settings)) or None


def complaints(newcomer: Member, others: Sequence[Member], settings: RouterSettings) -> Iterator[str]:
    """The reasons why ``newcomer`` cannot serve beside ``others``, each a sentence that says what to change."""
    yield from _about_role(newcomer)
    yield from _about_lease(newcomer, settings)
    yield from _about_transfer(newcomer, settings)
    if settings.append_prefill:
        yield from _about_append(newcomer, settings)
    if settings.pulls_back:
        yield from _about_pull_back(newcomer)
    for about_pair in (_about_models, _about_blocks, _about_connectors, _about_direction):
        found = (about_pair(newcomer, other) for other in others)
        yield from islice(filter(None, found), 1)


def doubt(member: Member, settings: RouterSettings) -> str | None:
    """What cannot be known of an engine that fits, in a sentence."""
    worker, contract = member
    prefills = contract.can_prefill and worker.settings.role != "decode"
    if not prefills or contract.kv_lease_seconds is not None or mode_of(contract) is Mode.LAYERWISE:
        return None
    return (
        f"not checked: whether {worker.origin} keeps KV for a Decoder for handoff_timeout_seconds "
        f"({settings.handoff_timeout_seconds:g}), as its contract tells no kv_lease_seconds; KV that is pulled later "
        f"than that is wrong"
    )


def _about_role(member: Member) -> Iterator[str]:
    worker, contract = member
    if contract.role is Role.NONE:
        yield f"{worker.origin} has no KV connector; start it with --kv-transfer-config"
    elif worker.settings.role == "prefill" and not contract.can_prefill:
        yield (
            f"{worker.origin} is configured to prefill, but its KV role is {contract.role.value}; "
            f"start it with kv_role kv_producer or kv_both, or configure it to decode"
        )
    elif worker.settings.role == "decode" and not contract.can_decode:
        yield (
            f"{worker.origin} is configured to decode, but its KV role is {contract.role.value}; "
            f"start it with kv_role kv_consumer or kv_both, or configure it to prefill"
        )


def _about_lease(member: Member, settings: RouterSettings) -> Iterator[str]:
    worker, contract = member
    lease, handoff = contract.kv_lease_seconds, settings.handoff_timeout_seconds
    if contract.can_prefill and lease is not None and lease < handoff:
        yield (
            f"{worker.origin} keeps KV for a Decoder for {lease:g} s only, less than handoff_timeout_seconds "
            f"({handoff:g}), and KV that is pulled later is wrong; raise the engine's kv_lease_duration or "
            f"lower handoff_timeout_seconds"
        )


def _about_transfer(member: Member, settings: RouterSettings) -> Iterator[str]:
    worker, contract = member
    if tells_nothing_spoken(contract):
        yield (
            f"{worker.origin} moves KV by {_listed(named(contract))}, which the router does not speak; name the same "
            f"connector in every engine's --kv-transfer-config, one of {_listed(CONNECTORS)}"
        )
    mode = mode_of(contract)
    if mode is Mode.PUSH and contract.can_prefill and len(contract.kv_endpoints) < contract.data_parallel_size:
        yield (
            f"{worker.origin} writes KV to Decoders, but does not tell where its connector is reached; install "
            f"schedloom in it, or declare kv_endpoints in its contract under workers"
        )
    if mode is Mode.LAYERWISE and settings.processes > 1:
        yield (
            f"{worker.origin} asks the router for prefills, and only the process that asked it knows of them; run the "
            f"router with processes: 1"
        )
    if mode is Mode.LAYERWISE and settings.callback_url is None and _is_wildcard(settings):
        yield (
            f"{worker.origin} asks the router for prefills, but {settings.host}:{settings.port} is no address to ask "
            f"at; set callback_url to where engines reach the router, as http://host:port"
        )


def _is_wildcard(settings: RouterSettings) -> bool:
    return settings.port == 0 or settings.host in ("", "0.0.0.0", "::")


def _about_pull_back(member: Member) -> Iterator[str]:
    worker, contract = member
    if not contract.bidirectional_kv:
        yield (
            f"the policy pull_back is on, but {worker.origin} does not move KV in both directions; start every engine "
            f"with bidirectional_kv_xfer in the extra configuration of NixlConnector, or the router without the policy"
        )


def _about_append(member: Member, settings: RouterSettings) -> Iterator[str]:
    worker, contract = member
    cause = _cause_of_attempts(settings)
    if worker.settings.role == "prefill" or not contract.can_decode:
        return
    if not contract.prefix_caching:
        yield (
            f"decoder append-prefill is enabled by {cause}, but {worker.origin} runs without prefix caching; start it "
            f"with --enable-prefix-caching, or the router without {cause}"
        )
    if APPEND_FEATURE not in contract.features:
        declared = contract.epoch.startswith(DECLARED_EPOCH)
        told = f" and declare features: [{APPEND_FEATURE}] in its contract under workers" if declared else ""
        yield (
            f"decoder append-prefill is enabled by {cause}, but {worker.origin} runs without it; start it with "
            f'--additional-config \'{{"scheduler_config":{{"decoder_append_prefill_enable":true}}}}\'{told}, or '
            f"the router without {cause}"
        )


def _cause_of_attempts(settings: RouterSettings) -> str:
    named = any(choice.name == OWNER_POLICY for choice in settings.policies)
    causes = {
        f"the policy {OWNER_POLICY}": named,
        "enable_decoder_append_prefill": settings.enable_decoder_append_prefill,
    }
    return " and ".join(cause for cause, holds in causes.items() if holds)


def _about_models(newcomer: Member, other: Member) -> str | None:
    (worker, contract), (neighbour, agreed) = newcomer, other
    if set(contract.models) == set(agreed.models):
        return None
    return (
        f"{worker.origin} serves {_listed(contract.models)}, but {neighbour.origin} serves "
        f"{_listed(agreed.models)}; give every engine the same model and --served-model-name"
    )


def _about_blocks(newcomer: Member, other: Member) -> str | None:
    (worker, contract), (neighbour, agreed) = newcomer, other
    if contract.block_size == agreed.block_size:
        return None
    return (
        f"{worker.origin} has KV blocks of {contract.block_size} tokens, but {neighbour.origin} has "
        f"{agreed.block_size}, and KV moved between them would be wrong; start both with the same "
        f"--block-size"
    )


def _about_connectors(newcomer: Member, other: Member) -> str | None:
    (worker, contract), (neighbour, agreed) = newcomer, other
    ours, theirs = families(contract), families(agreed)
    if not ours or not theirs or ours & theirs:
        return None
    return (
        f"{worker.origin} moves KV by {_listed(ours)}, but {neighbour.origin} by "
        f"{_listed(theirs)}; name the same connector in both engines' --kv-transfer-config"
    )


def _about_direction(newcomer: Member, other: Member) -> str | None:
    (worker, contract), (neighbour, agreed) = newcomer, other
    if contract.bidirectional_kv == agreed.bidirectional_kv:
        return None
    on, off = (worker, neighbour) if contract.bidirectional_kv else (neighbour, worker)
    return (
        f"bidirectional KV transfer is on in {on.origin} and off in {off.origin}, which makes requests "
        f"wait for ever; set bidirectional_kv_xfer on both or on neither"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
