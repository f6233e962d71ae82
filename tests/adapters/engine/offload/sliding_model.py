"""The demo's model with a sliding window in every other layer, so that its KV cache has two groups."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.numpy import load_file, save_file

from schedloom.demo.model import cached_model

CHANGES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def make_sliding_model(folder: Path) -> Path:
    """Llama in vLLM honours ``layer_types``; it has no norms on queries and keys."""
    shutil.copytree(cached_model(), folder)
    configuration = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(configuration | CHANGES))
    weights = load_file(folder / "model.safetensors")
    kept = {name: array for name, array in weights.items() if "q_norm" not in name and "k_norm" not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder
