"""What is to be looked after in a KV connector of vLLM, when and where vLLM loads it: another one costs no import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MARK = "tells_what_it_loads"

_acts: dict[str, list[Callable[[], None]]] = {}


def when_loaded(connector: str, act: Callable[[], None]) -> None:
    """Have vLLM's factory call ``act`` whenever it loads the class ``connector``, in a ``MultiConnector`` too."""
    acts = _acts.setdefault(connector, [])
    if act not in acts:
        acts.append(act)
    _listen()


def _listen() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    stock = KVConnectorFactory.get_connector_class
    if hasattr(stock, MARK):
        return

    def get_connector_class(kv_transfer_config: Any) -> Any:
        connector = stock(kv_transfer_config)
        for act in _acts.get(connector.__name__, ()):
            act()
        return connector

    setattr(get_connector_class, MARK, True)
    KVConnectorFactory.get_connector_class = staticmethod(get_connector_class)
