"""The demo's model: made on the spot, the same everywhere, and its answers survive the way through text."""

import hashlib
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from schedloom.demo.model import ANSWER_TOKENS, SPECIAL_TOKENS, cached_model, make_model
from schedloom.demo.weights import BIAS_CHANNEL


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cached_model(tmp_path_factory.mktemp("cache"))


def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def test_an_answer_encodes_to_its_own_tokens(model: Path) -> None:
    answer = random.Random(0).choices(ANSWER_TOKENS, k=20_000)
    text = tokenizer(model).decode(answer, skip_special_tokens=True)
    assert text.isascii() and text.isprintable()
    assert tokenizer(model).encode(text).ids == answer


def test_any_text_comes_back(model: Path) -> None:
    text = "".join(chr(code) for code in [*range(0x250), 0x20AC, 0x1F600]) + " two  spaces\r\n"
    assert tokenizer(model).decode(tokenizer(model).encode(text).ids) == text


def test_the_next_prompt_continues_the_last_one_and_its_answer(model: Path) -> None:
    chat = AutoTokenizer.from_pretrained(model)
    first = [{"role": "user", "content": "ping <3"}]
    follow_up = [*first, {"role": "assistant", "content": " pong!"}, {"role": "user", "content": "again"}]
    prompt, longer = (
        chat.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for messages in (first, follow_up)
    )
    assert longer[: len(prompt) + 6] == [*prompt, *b" pong!"]


def test_nothing_but_answer_tokens_can_win(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    unwanted = np.delete(weights["lm_head.weight"], ANSWER_TOKENS, axis=0)
    assert len(unwanted) == 256 + len(SPECIAL_TOKENS) - len(ANSWER_TOKENS)
    assert (unwanted[:, BIAS_CHANNEL] < 0).all() and not np.delete(unwanted, BIAS_CHANNEL, axis=1).any()
    assert (weights["model.embed_tokens.weight"][:, BIAS_CHANNEL] == 1).all()
    writers = [array for name, array in weights.items() if name.endswith(("o_proj.weight", "down_proj.weight"))]
    assert writers and not any(array[BIAS_CHANNEL].any() for array in writers)


def test_the_model_is_the_same_each_time(model: Path, tmp_path: Path) -> None:
    make_model(tmp_path)
    assert {path.name: digest(path) for path in tmp_path.iterdir()} == {
        path.name: digest(path) for path in model.iterdir()
    }
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


def test_callers_at_the_same_time_share_one_complete_model(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as callers:
        folders = set(callers.map(cached_model, [tmp_path] * 4))
    assert folders == set(tmp_path.iterdir())
    assert all((folder / "model.safetensors").exists() for folder in folders)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
