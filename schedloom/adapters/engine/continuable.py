"""Which requests anybody can continue from their tokens alone, and how an engine takes one up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from vllm.sampling_params import SamplingParams

from schedloom.core.continuation import RESUME_KEY, Ticket
from schedloom.core.wire import JOB_CLASS_KEY, RESERVED_PREFIX

HARMLESS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_tokens",
        "stop_token_ids",
        "ignore_eos",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "stream_interval",
        "skip_clone",
        "extra_args",
        "_eos_token_id",
        "_all_stop_token_ids",
        "watermarking",
        "_watermarking_skipped",
    }
)
"""Sampling parameters under which the next token depends on nothing but the tokens before it. The list is closed:
whatever else a request sets, and whatever vLLM adds, is not continued. Whether there are watermarks is the engine's to
say; requests of vLLM 0.31 ask for them unless told otherwise."""

HARMLESS_EXTRAS = frozenset({"kv_transfer_params", "session_id", JOB_CLASS_KEY})

_DEFAULTS = SamplingParams()
_OTHER_PARAMETERS = tuple(name for name in SamplingParams.__struct_fields__ if name not in HARMLESS)
_BEYOND_TOKENS = (
    "pooling_params",
    "prompt_embeds",
    "prompt_is_token_ids",
    "structured_output_request",
    "ec_transfer_params",
)


def obstacle(request: Any) -> str | None:
    """What of a vLLM request stands against continuing it from its tokens alone: a short code."""
    return next(_obstacles(request), None)


def _obstacles(request: Any) -> Iterator[str]:
    parameters = request.sampling_params
    yield from (name for name in _BEYOND_TOKENS if getattr(request, name) is not None)
    if parameters is None or request.prompt_token_ids is None:
        yield "no_tokens"
        return
    if request.mm_features:
        yield "mm_features"
    if request.resumable:
        yield "streaming_input"
    if _is_one_of_several(request.request_id):
        yield "n"
    yield from (name for name in _OTHER_PARAMETERS if _differs(parameters, name))
    if not all(name in HARMLESS_EXTRAS or name.startswith(RESERVED_PREFIX) for name in parameters.extra_args or ()):
        yield "extra_args"


def _differs(parameters: Any, name: str) -> bool:
    value, default = getattr(parameters, name), getattr(_DEFAULTS, name)
    return value is not None if default is None else bool(value != default)


def _is_one_of_several(request_id: str) -> bool:
    """vLLM numbers the requests that it makes of one with n > 1, and sets n to 1 in each of them."""
    number, _, _ = request_id.partition("_")
    return number.isdecimal()


def engine_obstacle(scheduler: Any) -> str | None:
    """What of an engine's configuration stands against continuing its requests from their tokens alone."""
    if scheduler.vllm_config.model_config.logits_processors or _logits_processors_are_installed():
        return "logits_processors"
    if scheduler.aux_output_connector is not None or getattr(scheduler, "return_sampling_mask", False):
        return "more_than_tokens"
    if getattr(scheduler.vllm_config, "watermark_config", None) is not None:
        return "watermarking"
    return None


@cache
def _logits_processors_are_installed() -> bool:
    """vLLM loads them into every engine. Once a process is enough: reading what is installed takes long."""
    return bool(entry_points(group="vllm.logits_processors"))


def ticket_of(request: Any) -> Ticket | None:
    """The ticket with which the router sent a continuation. Raises BadTicket."""
    extra = request.sampling_params.extra_args if request.sampling_params is not None else None
    return Ticket.read(extra[RESUME_KEY]) if extra and RESUME_KEY in extra else None


def continue_after(request: Any, output: Sequence[int]) -> None:
    """Make ``output`` part of the prompt of a request that no queue, cache or connector has seen yet."""
    request.prompt_token_ids = [*request.prompt_token_ids, *output]
    request._all_token_ids.extend(output)
    request.num_prompt_tokens += len(output)
    request.max_tokens -= len(output)
    request.sampling_params = copy(request.sampling_params)
    request.sampling_params.max_tokens = request.max_tokens
    request.update_block_hashes()
