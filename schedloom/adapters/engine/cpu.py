"""What real KV transfers need on a CPU platform. Does nothing on any other."""

from __future__ import annotations

import sys
from typing import Any

PROGRESS_THREAD_DELAY_MICROSECONDS = 200

MARK = "wrapped_by_schedloom"


def install() -> None:
    """See to it that NIXL agents made on a CPU platform let their progress thread sleep between polls.

    NIXL's Python interface fixes the delay at 0, so that each idle engine would burn a whole core.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    stock = KVConnectorFactory.create_connector
    if hasattr(stock.__func__, MARK):
        return

    def create_connector(cls: Any, *arguments: Any, **keywords: Any) -> Any:
        _let_progress_thread_sleep()
        return stock.__func__(cls, *arguments, **keywords)

    setattr(create_connector, MARK, True)
    KVConnectorFactory.create_connector = classmethod(create_connector)


def _let_progress_thread_sleep() -> None:
    try:
        from vllm.distributed.nixl_utils import NixlWrapper
    except ImportError:
        return
    if NixlWrapper is None:
        return
    bindings = sys.modules[NixlWrapper.__module__].nixlBind
    stock = bindings.nixlAgent
    if hasattr(stock, MARK):
        return

    def make_agent(name: str, configuration: Any) -> Any:
        configuration.pthrDelay = PROGRESS_THREAD_DELAY_MICROSECONDS
        return stock(name, configuration)

    setattr(make_agent, MARK, True)
    bindings.nixlAgent = make_agent
