"""Which requests the router can continue on another engine: a closed list, beside the engine's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from schedloom.core.wire import JOB_CLASS_KEY, EngineContract
from schedloom.router.requests.body import may_stream
from schedloom.router.requests.guard import EXTRA_ARGUMENTS

_HARMLESS: Final = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "ignore_eos",
        "stop_token_ids",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "return_token_ids",
        "priority",
        "cache_salt",
        "tools",
        "parallel_tool_calls",
        "chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "documents",
        "reasoning_effort",
        "include_reasoning",
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "safety_identifier",
        EXTRA_ARGUMENTS,
    }
)

_HARMLESS_AS: Final[dict[str, tuple[object, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "stop": ([], ""),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "length_penalty": (1, 1.0),
    "min_tokens": (0,),
    "bad_words": ([],),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
}
"""Fields that are harmless with one of these values only, of exactly these types: 0 log-probabilities are not none."""

SEAMLESS_TOOLS: Final = frozenset(
    {
        None,
        "glm45",
        "granite",
        "granite4",
        "hermes",
        "kimi_k2",
        "llama4_pythonic",
        "longcat",
        "minimax_m2",
        "mistral",
        "olmo3",
        "pythonic",
        "qwen3_coder",
        "qwen3_json",
        "qwen3_xml",
        "seed_oss",
    }
)
"""Parsers of tool calls that make the same of an answer wherever it is cut in two. Others are not known to."""

SEAMLESS_REASONING: Final = frozenset({None, "deepseek_v3", "glm45", "minimax_m2", "qwen3", "step3"})
"""Parsers of reasoning, likewise."""

_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})


def is_continuable(path: str, fields: dict[str, Any]) -> bool:
    """Whether a request's answer depends on nothing but its tokens, and its parts can be put together again."""
    return (
        path in _PATHS
        and all(_is_harmless(key, value) for key, value in fields.items() if value is not None)
        and (fields.get(EXTRA_ARGUMENTS) or {}).keys() <= {JOB_CLASS_KEY}
        and _is_one_prompt(fields.get("prompt"))
        and _are_text(fields.get("messages"))
    )


def is_seamless(fields: dict[str, Any], contracts: Iterable[EngineContract]) -> bool:
    """Whether a stream can be told from its middle: a whole answer, which replaces what was, always can."""
    if not may_stream(fields) or "messages" not in fields:
        return True
    return all(
        contract.reasoning_parser in SEAMLESS_REASONING
        and (not fields.get("tools") or _reads_tools_seamlessly(contract))
        for contract in contracts
    )


def _reads_tools_seamlessly(contract: EngineContract) -> bool:
    return contract.tool_parser in SEAMLESS_TOOLS


def _is_harmless(key: str, value: object) -> bool:
    if key in _HARMLESS:
        return True
    return any(value == harmless and type(value) is type(harmless) for harmless in _HARMLESS_AS.get(key, ()))


def _is_one_prompt(prompt: object) -> bool:
    if isinstance(prompt, list):
        return bool(prompt) and isinstance(prompt[0], int)
    return prompt is None or isinstance(prompt, str)


def _are_text(messages: object) -> bool:
    if messages is None:
        return True
    return isinstance(messages, list) and all(_is_text(message) for message in messages)


def _is_text(message: object) -> bool:
    content = message.get("content") if isinstance(message, dict) else 0
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)
