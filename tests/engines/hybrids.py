"""A small model whose layers keep a Mamba state beside attention, with random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

SEED = 3
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


TOLD = ("vocab_size", "eos_token_id", "max_position_embeddings")
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_d_ssm": 512,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 64,
    "mamba_chunk_size": 64,
    "initializer_range": 0.1,
}


def make_hybrid_model(model: Path, folder: Path) -> Path:
    """Falcon-H1, written to ``folder``, which must not exist, with the tokenizer of ``model``."""
    import torch
    from transformers import FalconH1Config, FalconH1ForCausalLM

    folder.mkdir()
    for name in TOKENIZER:
        shutil.copy(model / name, folder / name)
    told = json.loads((model / "config.json").read_text())
    torch.manual_seed(SEED)
    made: Any = FalconH1ForCausalLM
    made(FalconH1Config(**SIZES, **{key: told[key] for key in TOLD})).float().save_pretrained(folder)
    return folder
