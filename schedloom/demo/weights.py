"""The random weights of the demo's model."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from schedloom.demo.model import (
    ANSWER_TOKENS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
)

SEED = 7
# This channel of the residual stream is 1 for every token and no layer writes to it: the output head, which has
# no bias of its own, uses it as one against every token that must not appear in an answer.
BIAS_CHANNEL = 0
BIAS = -100.0
# Attention this sharp makes the next token depend on the whole context: answers vary, a wrong KV block shows.
QUERY_SCALE = 4.0
LOGIT_SCALE = 3.0

Array = NDArray[np.float32]


def write_weights(file: Path) -> None:
    """Writes float32 weights, the same at every call, in the layout of transformers' Qwen3."""
    save_file(_weights(np.random.default_rng(SEED)), file, {"format": "pt"})


def _weights(random: np.random.Generator) -> dict[str, Array]:
    embedding = random.standard_normal((VOCABULARY, HIDDEN), np.float32)
    embedding[:, BIAS_CHANNEL] = 1
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": _output_head(random),
    }
    for layer in range(LAYERS):
        weights |= {f"model.layers.{layer}.{name}.weight": array for name, array in _layer(random).items()}
    return weights


def _output_head(random: np.random.Generator) -> Array:
    head = np.zeros((VOCABULARY, HIDDEN), np.float32)
    head[ANSWER_TOKENS] = LOGIT_SCALE * _matrix(random, len(ANSWER_TOKENS), HIDDEN)
    head[:, BIAS_CHANNEL] = BIAS
    head[ANSWER_TOKENS, BIAS_CHANNEL] = 0
    return head


def _layer(random: np.random.Generator) -> dict[str, Array]:
    return {
        "input_layernorm": np.ones(HIDDEN, np.float32),
        "self_attn.q_proj": _matrix(random, HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": _matrix(random, KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": _matrix(random, KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": _residual_matrix(random, HEADS * HEAD_DIM),
        "self_attn.q_norm": np.full(HEAD_DIM, QUERY_SCALE, np.float32),
        "self_attn.k_norm": np.ones(HEAD_DIM, np.float32),
        "post_attention_layernorm": np.ones(HIDDEN, np.float32),
        "mlp.gate_proj": _matrix(random, INTERMEDIATE, HIDDEN),
        "mlp.up_proj": _matrix(random, INTERMEDIATE, HIDDEN),
        "mlp.down_proj": _residual_matrix(random, INTERMEDIATE),
    }


def _matrix(random: np.random.Generator, rows: int, columns: int) -> Array:
    """Keeps the variance of what it multiplies."""
    matrix = random.standard_normal((rows, columns), np.float32)
    matrix /= np.sqrt(columns)
    return matrix


def _residual_matrix(random: np.random.Generator, columns: int) -> Array:
    matrix = _matrix(random, HIDDEN, columns)
    matrix[BIAS_CHANNEL] = 0
    return matrix
