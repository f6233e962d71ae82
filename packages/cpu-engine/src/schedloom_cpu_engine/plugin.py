"""Loaded by vLLM in each of its processes: numbers that do not depend on the batch, ranks that can exchange, and a NIXL
that rests.
"""

import os
from typing import Any

from schedloom_cpu_engine import collectives

POLL_INTERVAL_MICROSECONDS = 200


def register() -> None:
    """What vLLM calls, before it computes anything."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    # oneDNN's AVX-512 kernels round a row that comes alone otherwise than the same row in a batch.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
    collectives.complete(CpuCommunicator)
    let_nixl_rest()


def let_nixl_rest() -> None:
    """Makes every NIXL agent of this process poll at an interval; does nothing where NIXL is not installed.

    NIXL's Python interface fixes the interval at zero, so that an idle engine's thread occupies one core.
    That is right beside an accelerator and wrong where the same cores compute the model.
    """
    try:
        from nixl import _api as api
    except ImportError:
        return
    bindings = api.nixlBind
    if not hasattr(bindings.nixlAgent, "polls_at_intervals"):
        bindings.nixlAgent = _polling_at_intervals(bindings.nixlAgent)


def _polling_at_intervals(agent_type: Any) -> Any:
    def make_agent(name: str, configuration: Any) -> Any:
        configuration.pthrDelay = POLL_INTERVAL_MICROSECONDS
        return agent_type(name, configuration)

    make_agent.polls_at_intervals = True  # type: ignore[attr-defined]
    return make_agent
