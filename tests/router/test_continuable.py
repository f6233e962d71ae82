"""Which requests are marked as continuable: a closed list, in which nothing unknown is harmless (A5)."""

from __future__ import annotations

from typing import Any

import pytest

from schedloom.core.wire import EngineContract, Role
from schedloom.router.continuation.continuable import is_continuable, is_seamless

CHAT: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, object] = {"model": "m", "prompt": "hi"}


def chat(**more: Any) -> bool:
    return is_continuable("/v1/chat/completions", CHAT | more)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"n": 1, "stop": None, "seed": None, "logprobs": False, "presence_penalty": 0, "frequency_penalty": 0.0},
        {"temperature": 0.7, "top_p": 0.9, "max_tokens": 5, "return_token_ids": True, "cache_salt": "s"},
        {"tools": [{"type": "function"}], "tool_choice": "auto", "response_format": {"type": "text"}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
        {"vllm_xargs": {"job_class": "batch"}},
        {"field_that_nobody_knows": None},
    ],
)
def test_ordinary_requests_are(more: dict[str, Any]) -> None:
    assert chat(**more)


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"n": True},
        {"stop": ["x"]},
        {"stop": "x"},
        {"logprobs": True},
        {"logprobs": 0},
        {"top_logprobs": 1},
        {"prompt_logprobs": 0},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -1},
        {"repetition_penalty": 1.1},
        {"seed": 0},
        {"min_tokens": 1},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json": {}}},
        {"guided_json": {}},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"use_beam_search": True},
        {"echo": True},
        {"bad_words": ["x"]},
        {"thinking_token_budget": 5},
        {"truncate_prompt_tokens": 5},
        {"vllm_xargs": {"a_processor_of_logits": 1}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}]},
        {"messages": "hi"},
        {"field_that_nobody_knows": False},
    ],
)
def test_what_depends_on_more_than_tokens_is_not(more: dict[str, Any]) -> None:
    assert not chat(**more)


def test_completions_have_one_prompt_of_text_or_tokens() -> None:
    path = "/v1/completions"
    assert is_continuable(path, TEXT) and is_continuable(path, TEXT | {"prompt": [1, 2]})
    others: list[object] = [[], ["hi"], [[1, 2]], {}]
    assert not any(is_continuable(path, TEXT | {"prompt": prompt}) for prompt in others)
    assert not is_continuable(path, TEXT | {"logprobs": 0})


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/tokenize"])
def test_other_endpoints_are_not(path: str) -> None:
    assert not is_continuable(path, CHAT)


TOOLS: dict[str, object] = {"stream": True, "tools": [{"type": "function"}]}


@pytest.mark.parametrize(
    ("more", "parsers", "seamless"),
    [
        ({"stream": True}, {"tool_parser": "xlam"}, True),
        (TOOLS, {}, True),
        (TOOLS, {"tool_parser": "hermes"}, True),
        (TOOLS, {"tool_parser": "xlam"}, False),
        (TOOLS | {"stream": False}, {"tool_parser": "xlam"}, True),
        (TOOLS | {"stream": "true"}, {"tool_parser": "xlam"}, False),
        ({"stream": 1}, {"reasoning_parser": "ernie45"}, False),
        ({"stream": True}, {"reasoning_parser": "qwen3"}, True),
        ({"stream": True}, {"reasoning_parser": "ernie45"}, False),
    ],
)
def test_a_stream_is_continued_only_behind_parsers_that_leave_no_seam(
    more: dict[str, object], parsers: dict[str, str], seamless: bool
) -> None:
    plain = EngineContract(role=Role.CONSUMER, models=["m"], block_size=16)
    assert is_seamless(CHAT | more, [plain, plain.model_copy(update=parsers)]) is seamless
    assert is_seamless(TEXT | {"stream": True}, [plain.model_copy(update=parsers)])
