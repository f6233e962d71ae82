"""Which way of moving KV an engine's connector speaks."""

from __future__ import annotations

from enum import Enum

from schedloom.core.wire import EngineContract


class Mode(str, Enum):
    """PULL: the Prefiller first, then a Decoder that reads. PUSH: both at once, the Prefiller writes. LAYERWISE: the
    Decoder first, which asks the router for a prefill that writes layer by layer.
    """

    PULL = "pull"
    PUSH = "push"
    LAYERWISE = "layerwise"


CONNECTORS = {
    "NixlConnector": Mode.PULL,
    "NixlPullConnector": Mode.PULL,
    "NixlPushConnector": Mode.PUSH,
    "MooncakeConnectorV1": Mode.PULL,
    "MooncakeConnectorV2": Mode.PULL,
    "MooncakeHybridConnector": Mode.PULL,
    "MooncakePullConnector": Mode.PULL,
    "MooncakeLayerwiseConnector": Mode.LAYERWISE,
}
"""vLLM's and vllm-ascend's connectors that move KV from a Prefiller to a Decoder."""

_FAMILIES = {"NixlPullConnector": "NixlConnector", "MooncakePullConnector": "MooncakeConnectorV2"}
"""Names of one and the same connector."""


def families(contract: EngineContract) -> set[str]:
    """The connectors that an engine moves KV by; empty when it does not tell. Those of other purposes are left out."""
    return {_FAMILIES.get(name, name) for name in named(contract) if name in CONNECTORS}


def tells_nothing_spoken(contract: EngineContract) -> bool:
    """Whether an engine names connectors, and none that the router speaks."""
    return bool(named(contract)) and not families(contract)


def mode_of(contract: EngineContract) -> Mode:
    """An engine that does not tell is taken to be pulled from."""
    modes = sorted(CONNECTORS[name].value for name in families(contract))
    return Mode(modes[0]) if modes else Mode.PULL


def named(contract: EngineContract) -> set[str]:
    """Every connector that an engine tells of."""
    return {*contract.kv_connectors, *([contract.kv_connector] if contract.kv_connector else [])}
