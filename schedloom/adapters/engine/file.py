"""What vLLM's own configuration file shows of an engine before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from schedloom.adapters.engine.connectors import connectors_of
from schedloom.adapters.engine.contract import ROLES
from schedloom.adapters.engine.offload import CONNECTOR
from schedloom.adapters.engine.offload.settings import read_settings
from schedloom.adapters.engine.selection import COMPOSABLE
from schedloom.core.diagnosis import Prospect
from schedloom.core.errors import ConfigurationError
from schedloom.core.policy import Policy
from schedloom.core.reading import parse_json
from schedloom.core.requirements import twice_ordered, unmet
from schedloom.core.wire import EngineContract, Role

_TRANSFER = "kv_transfer_config"
_SHOWN_BY_TRANSFER = {"decoder", "preempted_kv"}


def forecast(values: Mapping[str, Any], section: Any, policies: Sequence[Policy]) -> Prospect:
    """What a start would refuse of ``policies`` for what else the file says, and the needs that it says nothing of.

    Raises ConfigurationError for a KV transfer configuration that cannot be read.
    """
    options = {key.replace("-", "_"): value for key, value in values.items()}
    complaints = [*_unfit_connector(options), *unmet(policies, _shown(options))]
    complaints += twice_ordered(policies, options.get("scheduling_policy") or "fcfs")
    return Prospect(tuple(complaints), tuple(_unseen(options, policies)))


def _shown(options: Mapping[str, Any]) -> EngineContract:
    """The engine's contract; where the file is silent, what fits."""
    known, transfer = _TRANSFER in options, _transfer(options)
    return EngineContract(
        role=(ROLES.get(transfer.kv_role, Role.NONE) if transfer else Role.NONE) if known else Role.BOTH,
        models=["unknown"],
        block_size=1,
        prefix_caching=_is_on(options, "enable_prefix_caching"),
        chunked_prefill=_is_on(options, "enable_chunked_prefill"),
        saves_preempted_kv=not known or CONNECTOR in _connectors(transfer),
    )


def _is_on(options: Mapping[str, Any], option: str) -> bool:
    return bool(options.get(option, True)) and not options.get(f"no_{option}")


def _transfer(options: Mapping[str, Any]) -> Any:
    """vLLM's KV transfer configuration as its attributes."""
    given = options.get(_TRANSFER)
    try:
        given = parse_json(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ConfigurationError(f"{_TRANSFER} is no JSON: {error}") from error
    if not given:
        return None
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{_TRANSFER} must be a mapping, with kv_connector and kv_role")
    fields = dict.fromkeys(("kv_role", "kv_connector", "kv_connector_extra_config"))
    return SimpleNamespace(**{**fields, **given})


def _connectors(transfer: Any) -> dict[str, dict[str, Any]]:
    try:
        return connectors_of(transfer)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{_TRANSFER}: connectors must each be a mapping with kv_connector, in kv_connector_extra_config"
        ) from error


def _unfit_connector(options: Mapping[str, Any]) -> Iterator[str]:
    extra = _connectors(_transfer(options)).get(CONNECTOR)
    if extra is not None:
        try:
            read_settings(extra)
        except ConfigurationError as error:
            yield from error.sentences


def _unseen(options: Mapping[str, Any], policies: Sequence[Policy]) -> Iterator[str]:
    """vLLM's defaults meet the other needs; a section alone shows nothing of what its engine is told."""
    if policies and options.get("scheduler_cls"):
        yield (
            f"not checked: whether {options['scheduler_cls']} sets {COMPOSABLE} = True, without which policies beside "
            "--scheduler-cls are refused; its start checks it"
        )
    whole = "additional_config" in options
    seen = _SHOWN_BY_TRANSFER if _TRANSFER in options else set()
    for policy in policies:
        needs = set(policy.requires.needed) - seen
        unseen = sorted(needs & _SHOWN_BY_TRANSFER if whole else needs)
        if unseen:
            yield (
                f"not checked: whether the engine has what policy {policy.name!r} needs ({', '.join(unseen)}), which "
                f"this file does not show; its start checks it"
            )
