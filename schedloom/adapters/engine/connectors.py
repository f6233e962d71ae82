"""The KV connectors that an engine is configured with."""

from __future__ import annotations

from typing import Any, Final

_DEFAULT_PORT: Final = 14579
"""vLLM's, for each connector that a MultiConnector combines."""


def connectors_of(transfer: Any) -> dict[str, dict[str, Any]]:
    """The extra configuration of each KV connector by its name, of those that a MultiConnector combines too."""
    if transfer is None:
        return {}
    children = {each["kv_connector"]: each.get("kv_connector_extra_config") or {} for each in _combined(transfer)}
    return {transfer.kv_connector: transfer.kv_connector_extra_config or {}, **children}


def port_of(transfer: Any, name: str) -> int:
    """The ``kv_port`` of the connector ``name``."""
    own = next((each for each in _combined(transfer) if each["kv_connector"] == name), None)
    return int(transfer.kv_port if own is None else own.get("kv_port", _DEFAULT_PORT))


def _combined(transfer: Any) -> list[dict[str, Any]]:
    extra = transfer.kv_connector_extra_config or {}
    combined: list[dict[str, Any]] = extra.get("connectors", [])
    return combined
