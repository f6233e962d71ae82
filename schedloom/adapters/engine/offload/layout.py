"""The shape of a KV cache: which caches can be saved exactly, and how many bytes a block has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

# Exact types: a subclass may keep state that is not found at a token's place in its block.
EXACT = frozenset({FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec})


def obstacle(kv_cache_config: Any, parallel_config: Any) -> str | None:
    """Why no request of this engine can be saved exactly, as a short code, or None."""
    if parallel_config.decode_context_parallel_size > 1 or parallel_config.prefill_context_parallel_size > 1:
        return "context_parallel"
    if all(map(_can_be_saved, kv_cache_config.kv_cache_groups)):
        return None
    return "unsupported_cache"


def block_bytes(kv_cache_config: Any) -> int:
    """Bytes of one block on one worker; of the largest, where groups differ."""
    return max(map(_group_block_bytes, kv_cache_config.kv_cache_groups), default=0)


def _can_be_saved(group: Any) -> bool:
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        return False
    return all(type(spec) in EXACT and spec.tokens_per_state == 1 for spec in _layer_specs(group.kv_cache_spec))


def _group_block_bytes(group: Any) -> int:
    spec = group.kv_cache_spec
    layers = 1 if hasattr(spec, "kv_cache_specs") else len(group.layer_names)
    return int(spec.page_size_bytes) * layers


def _layer_specs(spec: Any) -> Iterable[Any]:
    """The specifications that a group of layers of different sizes holds, or its only one."""
    return spec.kv_cache_specs.values() if hasattr(spec, "kv_cache_specs") else (spec,)
