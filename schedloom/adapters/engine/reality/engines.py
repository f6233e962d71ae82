"""Starting vLLM's engines inside this process, beside one another."""

from __future__ import annotations

import os
from typing import Any

BLOCK = 32
"""Tokens in a block: attention on a CPU wants a multiple of 32."""

MAX_SEQUENCES = 16


def start(model: str, asynchronous: bool = False, **settings: Any) -> Any:
    """An ``LLM`` with float32 weights, without policies unless ``settings`` bring some."""
    from vllm import LLM

    common = {
        "enforce_eager": True,
        "max_model_len": 20 * BLOCK,
        "kv_cache_memory_bytes": 64 << 20,
        "block_size": BLOCK,
        "dtype": "float32",
        "max_num_seqs": MAX_SEQUENCES,
        "disable_log_stats": False,
    }
    return LLM(model=model, async_scheduling=asynchronous, **{**common, **settings})


def neighbour(model: str, port: int, **settings: Any) -> Any:
    """One of several live engines: vLLM keeps one connector for each process, so each step puts its own back.

    ``port`` is where NIXL shakes hands. They cannot be shut down one by one: the end of the process ends them.
    """
    import vllm.distributed.kv_transfer.kv_transfer_state as state
    from vllm import envs

    envs.disable_envs_cache()
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
    state._KV_CONNECTOR_AGENT = None
    engine = start(model, **settings)
    agent, core = state._KV_CONNECTOR_AGENT, core_of(engine)
    step = core.step_fn

    def own_step() -> Any:
        state._KV_CONNECTOR_AGENT = agent
        return step()

    core.step_fn = own_step
    return engine


def core_of(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core


def scheduler_of(engine: Any) -> Any:
    return core_of(engine).scheduler


def keep_asynchronous_scheduling() -> None:
    """vLLM's CPU platform turns it off. Its runners can do it all the same: from now on what is asked for is kept."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config.__func__

    def keeping(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    platform.check_and_update_config = classmethod(keeping)


def connectors(names: str, host_bytes: str = "64MiB") -> dict[str, Any] | None:
    """``kv_transfer_config`` of a Decoder. ``names``: none, offload, pull (NIXL), or both, as operators write them."""
    offload = {
        "kv_connector": "PreemptOffloadConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"host_bytes": host_bytes},
    }
    pull = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"connectors": [pull, offload]},
    }
    return {"none": None, "offload": offload, "pull": pull, "both": both}[names]
