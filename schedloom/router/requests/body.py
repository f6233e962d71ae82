"""A generation request's body: read once, then written for each kind of attempt."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, TypeGuard

import orjson

from schedloom.core.wire import LOCAL_ATTEMPT_KEY, PROTOCOL_VERSION
from schedloom.router.requests.guard import (
    EXTRA_ARGUMENTS,
    SESSION_KEYS,
    holds_nothing_guarded,
    parse_object,
    without_guarded_keys,
    written,
)

SALT_KEY = "cache_salt"

_PROMPT_KEYS = ("tools", "system", "instructions", "prompt", "messages", "input")
"""What a model is asked, in the order in which engines put it into a prompt."""

Marks = Mapping[str, object]
"""What the router says to an engine under ``vllm_xargs``."""

NO_MARKS: Marks = {}

_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

_NOT_FOR_PREFILLERS = frozenset(
    {
        "stream_options",
        "stream_interval",
        "min_tokens",
        "thinking_token_budget",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "repetition_detection",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_json_object",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "structural_tag",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "return_token_offsets",
        "return_prompt_text",
        "return_weight_versions",
        "routed_experts_prompt_start",
    }
)
"""What shapes the output and how it is told, but not the prompt."""


_MAY_BE_UNUSUAL = frozenset({"n", "best_of", "prompt", "prompt_logprobs", "echo", "use_beam_search", "prompt_embeds"})

_ONE_TOKEN = {"max_tokens": 1, "n": 1, "ignore_eos": True}


class GenerationBody:
    """What a client asked for, without what it may not ask; ``splittable`` tells whether one transfer of KV
    can serve it.

    ``salt`` keeps its KV apart from other tenants'. ``raw`` are the client's own bytes wherever nothing had
    to be removed or replaced. ``conversation`` is the session that the body names, by a string with content. Raises
    Failure (400) for a body that cannot be understood.
    """

    __slots__ = ("_added", "conversation", "fields", "model", "raw", "splittable")

    def __init__(self, raw: bytes, salt: str | None = None) -> None:
        fields = parse_object(raw)
        self.conversation: str | None = None
        self.fields, self.raw = fields, raw
        if not holds_nothing_guarded(fields):
            self.conversation = _named_in(fields)
            self.fields, self.raw = without_guarded_keys(fields, raw)
        model = fields.get("model")
        self.model = model if isinstance(model, str) else ""
        self.splittable = _is_splittable(self.fields)
        self._added: dict[str, object] = {}
        if salt is not None:
            self.name(SALT_KEY, salt)

    @property
    def streaming(self) -> bool:
        return may_stream(self.fields)

    @property
    def salt(self) -> str | None:
        salt = self.fields.get(SALT_KEY)
        return salt if isinstance(salt, str) else None

    @property
    def token_ids(self) -> list[int] | None:
        """The prompt's, where the client sent it as such."""
        prompt = self.fields.get("prompt")
        return prompt if are_token_ids(prompt) else None

    def follows_up(self) -> bool:
        """Whether an answer stands in what is asked, or is referred to."""
        turns = self.fields.get("messages") or self.fields.get("input")
        answered = isinstance(turns, list) and any(_is_answer(turn) for turn in reversed(turns))
        return answered or isinstance(self.fields.get("previous_response_id"), str)

    def prompt(self) -> bytes:
        """What the model is asked: of two prompts one of which goes on where the other ends, this does too."""
        return written({key: self.fields[key] for key in _PROMPT_KEYS if key in self.fields}).rstrip(b'"]}')

    def for_release(self, transfer_parameters: dict[str, Any]) -> bytes:
        """The least that makes a Decoder take over KV that nobody needs any more."""
        return self.for_prefiller(transfer_parameters)

    def for_prefiller(self, transfer_parameters: dict[str, Any] = _REMOTE_DECODE, *, stream: bool = False) -> bytes:
        """A request that computes the prompt's KV, keeps it for a Decoder and stops after one token.

        End-of-sequence is ignored, because a Prefiller hands over KV only of a request that its length limit
        ended.
        """
        fields = {**self.fields, **_ONE_TOKEN, "stream": stream, "kv_transfer_params": transfer_parameters}
        for key in _NOT_FOR_PREFILLERS.intersection(fields):
            del fields[key]
        if "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = 1
        return written(fields)

    def for_decoder(
        self, transfer_parameters: dict[str, Any], marks: Marks = NO_MARKS, *, with_ids: bool = False
    ) -> bytes:
        """The client's request, with the KV that a Prefiller has ready for it; the answer also tells token ids."""
        ids = {"return_token_ids": True} if with_ids and "return_token_ids" not in self.fields else {}
        return self._with({"kv_transfer_params": transfer_parameters, **ids}, marks)

    def for_local_attempt(self, marks: Marks = NO_MARKS) -> bytes:
        """The client's request, marked: the Decoder may turn it away when it holds no usable prefix."""
        return self._with({}, {LOCAL_ATTEMPT_KEY: PROTOCOL_VERSION, **marks})

    def for_one_decoder(self, marks: Marks = NO_MARKS) -> bytes:
        """The client's request, all of it for one Decoder."""
        return self._with({}, marks)

    def name(self, key: str, value: object) -> None:
        """Say this under ``key``, whatever the client said there."""
        is_new = key not in self.fields
        self.fields[key] = value
        if is_new:
            self._added[key] = value
        else:
            self.raw, self._added = written(self.fields), {}

    def _with(self, keys: dict[str, object], marks: Marks = NO_MARKS) -> bytes:
        """``raw`` with what the router names, with ``keys``, which must not be there yet, and with ``marks`` beside the
        client's own extra arguments.
        """
        keys = self._added | keys
        if marks:
            own = self.fields.get(EXTRA_ARGUMENTS)
            if own is not None:
                return written({**self.fields, **keys, EXTRA_ARGUMENTS: {**own, **marks}})
            keys = {**keys, EXTRA_ARGUMENTS: marks}
        if not keys:
            return self.raw
        begin = memoryview(self.raw)[: self.raw.rindex(b"}")]
        is_empty = len(self.fields) == len(self._added)
        return b"".join((begin, b"" if is_empty else b",", orjson.dumps(keys)[1:]))


def may_stream(fields: Mapping[str, Any]) -> bool:
    """Whether an engine may answer with a stream: it reads ``"true"`` and 1 as ``true``."""
    return fields.get("stream") not in (None, False)


def _named_in(fields: dict[str, Any]) -> str | None:
    for key in SESSION_KEYS:
        name = fields.get(key)
        if isinstance(name, str) and name:
            return name
    return None


def _is_answer(turn: object) -> bool:
    return isinstance(turn, dict) and turn.get("role") == "assistant"


def _is_splittable(fields: dict[str, Any]) -> bool:
    get = fields.get
    if _MAY_BE_UNUSUAL.isdisjoint(fields):
        return get("max_tokens") != 0
    several = get("n") not in (None, 1) or get("best_of") not in (None, 1) or _is_several_prompts(get("prompt"))
    of_the_prompt = get("prompt_logprobs") is not None or bool(get("echo"))
    unusual = bool(get("use_beam_search")) or get("prompt_embeds") is not None or get("max_tokens") == 0
    return not (several or of_the_prompt or unusual)


def are_token_ids(value: Any) -> TypeGuard[list[int]]:
    """Whether it is a list of some, and of nothing else."""
    try:
        return isinstance(value, list) and len(array("I", value)) > 0
    except (TypeError, OverflowError):
        return False


def _is_several_prompts(prompt: object) -> bool:
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
