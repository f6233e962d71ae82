"""A small Qwen3-style model with random weights, written to a folder that vLLM loads like any other model.

Every byte is one token, and answers are printable ASCII: an answer decoded to text and encoded again gives
the same token ids, and an answer always has exactly `max_tokens` tokens.
"""

import hashlib
import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

SEED = 7
LAYERS = 4
HIDDEN = 512
INTERMEDIATE = 1536
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|pad|>")
VOCABULARY = 256 + len(SPECIAL_TOKENS)
# Without "<" an answer never spells a special token.
ANSWER_TOKENS = [byte for byte in range(0x20, 0x7F) if byte != ord("<")]
# This channel of the residual stream is 1 for every token and no layer writes to it: the output head, which has
# no bias of its own, uses it as one against every token that must not appear in an answer.
BIAS_CHANNEL = 0
BIAS = -100.0
# Attention this sharp makes the next token depend on the whole context: answers vary, a wrong KV block shows.
QUERY_SCALE = 4.0
LOGIT_SCALE = 3.0

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Array = NDArray[np.float32]


def cached_model(cache: Path | None = None) -> Path:
    """The folder of the demo's model below `cache` (by default the user's), made there at the first call.

    Safe to call from several processes at once. A new version of this module gets a folder of its own.
    """
    base = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "schedloom"
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    directory = base / f"demo-model-{version}"
    if not directory.exists():
        _make_whole_or_not_at_all(directory)
    return directory


def make_model(directory: Path) -> None:
    """Writes configuration, tokenizer and weights (float32, about 45 MB) to `directory`, which must exist."""
    for name, content in _metadata().items():
        (directory / name).write_text(json.dumps(content, indent=1))
    save_file(_weights(np.random.default_rng(SEED)), directory / "model.safetensors", {"format": "pt"})


def _make_whole_or_not_at_all(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=directory.name, dir=directory.parent))
    try:
        make_model(draft)
        draft.rename(directory)
    except OSError:
        if not directory.exists():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _metadata() -> dict[str, Any]:
    return {
        "config.json": _configuration(),
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": CHAT_TEMPLATE,
            "eos_token": "<|im_end|>",
            "pad_token": "<|pad|>",
            "clean_up_tokenization_spaces": False,
        },
    }


def _configuration() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "eos_token_id": 256 + SPECIAL_TOKENS.index("<|im_end|>"),
        "dtype": "float32",
    }


def _tokenizer() -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [_special_token(*entry) for entry in enumerate(SPECIAL_TOKENS, start=256)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": _byte_vocabulary(), "merges": []},
    }


def _special_token(token_id: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True, **flags}


def _byte_vocabulary() -> dict[str, int]:
    """The characters by which byte-level tokenizers write the 256 bytes, each with its byte as token id."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = itertools.count(256)
    return {chr(byte if byte in visible else next(substitutes)): byte for byte in range(256)}


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
