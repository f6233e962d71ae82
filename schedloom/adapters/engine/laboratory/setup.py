"""From a cell of the matrix to a real vLLM scheduler, without a model or a device."""

from __future__ import annotations

import atexit
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.structured_output import StructuredOutputManager

from schedloom.adapters.engine.laboratory.drafting import NUM_DRAFTS

CONNECTOR_MODULE = "schedloom.adapters.engine.laboratory.connector"
OFFLOAD_MODULE = "schedloom.adapters.engine.offload.connector"
HOST_BYTES = 512
"""Host memory for preempted requests: sometimes too little."""

SAVE_TIMEOUT_SECONDS = 2.0
"""How long the laboratory's own clock runs before a save that was never reported is given up."""

MAX_ADAPTERS = 2
"""Adapters whose requests may share a batch: fewer than there are."""

KV_ROLES = {"consumer": "kv_consumer", "producer": "kv_producer", "both": "kv_both"}

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 65536,
    "max_position_embeddings": 65536,
    "torch_dtype": "float32",
}


@cache
def _model() -> str:
    folder = Path(tempfile.mkdtemp(prefix="schedloom-laboratory-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    return str(folder)


def vllm_config(cell: Any, fabric: int) -> VllmConfig:
    """The configuration of an engine for ``cell``; its connectors find their far side under the number ``fabric``."""
    with _runner_version(cell.runner):
        config = VllmConfig(
            model_config=ModelConfig(
                model=_model(),
                dtype="float32",
                max_model_len=cell.max_model_len,
                skip_tokenizer_init=True,
                enforce_eager=True,
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=cell.max_num_seqs,
                max_num_batched_tokens=cell.token_budget,
                max_model_len=cell.max_model_len,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=cell.asynchronous,
                policy="priority" if cell.priority else "fcfs",
            ),
            cache_config=CacheConfig(block_size=cell.block_size, enable_prefix_caching=cell.prefix_caching),
            kv_transfer_config=_transfer(cell, fabric),
            device_config=DeviceConfig("cpu"),
        )
    # vLLM's CPU platform turns asynchronous scheduling off, because its own runner has none.
    config.scheduler_config.async_scheduling = cell.asynchronous
    config.lora_config = LoRAConfig(max_loras=MAX_ADAPTERS)
    if cell.drafts:
        config.speculative_config = _speculation(cell, config)
    return config


def _speculation(cell: Any, config: VllmConfig) -> SpeculativeConfig:
    """Set when all else is checked: a drafter that looks ahead would want a model of its own."""
    drafts = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=NUM_DRAFTS,
        prompt_lookup_max=4,
        prompt_lookup_min=2,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    drafts.method = "eagle" if cell.variant == "eagle" else "ngram_gpu" if cell.asynchronous else "ngram"
    return drafts


_OFFLOAD = {"host_bytes": HOST_BYTES, "save_timeout_seconds": SAVE_TIMEOUT_SECONDS}


def _transfer(cell: Any, fabric: int) -> KVTransferConfig | None:
    if not cell.connects:
        return None
    common = {
        "kv_role": KV_ROLES.get(cell.role, "kv_both"),
        "kv_load_failure_policy": "recompute" if cell.recompute_failed_loads else "fail",
    }
    transfers = "PushConnector" if cell.pushes else "PullConnector"
    children = [_child(transfers, CONNECTOR_MODULE, {"fabric": fabric})] if cell.role != "none" else []
    if cell.offload:
        children.insert(0, _child("PreemptOffloadConnector", OFFLOAD_MODULE, _OFFLOAD))
    if not cell.multi_connector:
        return KVTransferConfig(**children[0], **common)
    if len(children) == 1:
        children.insert(0, _child("IdleConnector", CONNECTOR_MODULE, {"fabric": fabric}))
    extra = {"connectors": [{**child, **common} for child in children]}
    return KVTransferConfig(kv_connector="MultiConnector", kv_connector_extra_config=extra, **common)


def _child(name: str, module: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_module_path": module, "kv_connector_extra_config": extra}


@contextmanager
def _runner_version(runner: str) -> Iterator[None]:
    """vLLM reads which model runner it has from the environment, whenever it is asked."""
    name = "VLLM_USE_V2_MODEL_RUNNER"
    before = os.environ.get(name)
    os.environ[name] = "1" if runner == "v2" else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def stock_class(cell: Any) -> type[Any]:
    return AsyncScheduler if cell.asynchronous else Scheduler  # type: ignore[no-any-return]


class ZeroedKVCacheConfig(KVCacheConfig):
    """Says what a cache with Mamba layers says; the order of zeroing and saving is what such a layer would expose."""

    needs_kv_cache_zeroing = True


def kv_cache_config(cell: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([layer_name(number)], _spec(group)) for number, group in enumerate(cell.groups)]
    config = ZeroedKVCacheConfig if cell.zeroing else KVCacheConfig
    return config(num_blocks=cell.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def layer_name(group: int) -> str:
    return f"layer {group}"


def _spec(group: Any) -> FullAttentionSpec | SlidingWindowSpec:
    # One float each for K and V: eight bytes a token, which is one record.
    shape = {"block_size": group.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if group.window is None:
        return FullAttentionSpec(**shape)
    return SlidingWindowSpec(**shape, sliding_window=group.window)


def block_sizes(cell: Any) -> tuple[int, int]:
    """What the scheduler aligns to, and what is hashed, in tokens: as vLLM's engine core works them out."""
    sizes = [group.block_size for group in cell.groups]
    aligned = math.lcm(*sizes)
    return aligned, math.gcd(*sizes) if cell.prefix_caching or cell.connects else aligned


def make_scheduler(scheduler: Any, cell: Any, config: VllmConfig) -> Any:
    config.cache_config.num_gpu_blocks = cell.num_blocks
    block_size, hash_block_size = block_sizes(cell)
    with _runner_version(cell.runner):
        return scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache_config(cell),
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
