"""The demo's model as a mixture of experts: only the data-parallel ranks of such a model step together in vLLM."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

EXPERTS = 4
CHOSEN = 2
"""Of the experts, for each token."""

SEED = 11


def mixture_of_experts(model: Path, folder: Path) -> Path:
    """Written to ``folder``, which must not exist: each feed-forward layer of ``model`` is cut into experts."""
    shutil.copytree(model, folder)
    configuration = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(_with_experts(configuration)))
    save_file(_cut_into_experts(load_file(model / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


def _with_experts(configuration: dict[str, Any]) -> dict[str, Any]:
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": configuration["intermediate_size"] // EXPERTS,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return configuration | experts


def _cut_into_experts(weights: dict[str, Any]) -> dict[str, Any]:
    random = np.random.default_rng(SEED)
    cut: dict[str, Any] = {}
    for name, array in weights.items():
        before, feed_forward, projection = name.partition(".mlp.")
        if not feed_forward:
            cut[name] = array
            continue
        parts = np.split(array, EXPERTS, axis=1 if projection == "down_proj.weight" else 0)
        cut |= {f"{before}.mlp.experts.{n}.{projection}": np.ascontiguousarray(part) for n, part in enumerate(parts)}
        if projection == "gate_proj.weight":
            cut[f"{before}.mlp.gate.weight"] = random.standard_normal((EXPERTS, array.shape[1]), np.float32)
    return cut
