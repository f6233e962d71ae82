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

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def cached_model(cache: Path | None = None) -> Path:
    """The folder of the demo's model below `cache` (by default the user's), made there at the first call.

    Safe to call from several processes at once. A model made by other code gets a folder of its own.
    """
    base = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "schedloom"
    sources = [Path(__file__), Path(__file__).with_name("weights.py")]
    version = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    directory = base / f"demo-model-{version}"
    if not directory.exists():
        _make_whole_or_not_at_all(directory)
    return directory


def make_model(directory: Path) -> None:
    """Writes configuration, tokenizer and weights (float32, about 45 MB) to `directory`, which must exist."""
    for name, content in _metadata().items():
        (directory / name).write_text(json.dumps(content, indent=1))
    # Not at the top: numpy comes with an engine, and `schedloom` has to load without one.
    from schedloom.demo.weights import write_weights

    write_weights(directory / "model.safetensors")


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
