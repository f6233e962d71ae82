"""How an answer begins: whether it is one, before anything of it reaches the client."""

from __future__ import annotations

from enum import Enum
from typing import Any

from schedloom.core.wire import REJECTION_PREFIX
from schedloom.router.sse import DONE, data_of, parsed, split_events

_REJECTION_FINISHES = ("stop", "tool_calls")
"""vLLM shows the second instead of the first where the client requires a tool call."""

_NOT_CONTENT = frozenset({"role"})


class Beginning(Enum):
    """UNDECIDED: more is needed to tell. ANSWER: output has begun. REJECTED: turned away without output.
    ERROR: an error instead of an answer.
    """

    UNDECIDED = "undecided"
    ANSWER = "answer"
    REJECTED = "rejected"
    ERROR = "error"


class StreamOpening:
    """Judges the first events of a stream.

    For an ordinary answer the first event decides. A ``local`` attempt is undecided until its first content
    or finish reason: engines before vLLM 0.33 drop the finish chunk of an answer without tokens, so that a
    rejection may be no more than a role chunk, a usage chunk and the end mark. A real answer always tells a
    finish reason.
    """

    def __init__(self, *, local: bool) -> None:
        self.reason = ""
        self.error: dict[str, Any] = {}
        self._local = local

    def judge(self, events: bytes) -> Beginning:
        for event in split_events(events):
            data = data_of(event)
            beginning = Beginning.UNDECIDED if data is None else self._judge_data(data)
            if beginning is not Beginning.UNDECIDED:
                return beginning
        return Beginning.UNDECIDED

    def _judge_data(self, data: bytes) -> Beginning:
        if data == DONE:
            return Beginning.REJECTED if self._local else Beginning.ANSWER
        fields = parsed(data)
        if "error" in fields and "choices" not in fields:
            self.error = fields
            return Beginning.ERROR
        if not self._local:
            return Beginning.ANSWER
        return self._judge_chunk(fields)

    def _judge_chunk(self, chunk: dict[str, Any]) -> Beginning:
        choices = chunk.get("choices") or []
        for choice in choices:
            if choice.get("finish_reason") is not None:
                return self._judge_finish(choice)
        if any(map(_has_content, choices)) or _completion_tokens(chunk) > 0:
            return Beginning.ANSWER
        return Beginning.UNDECIDED

    def _judge_finish(self, choice: dict[str, Any]) -> Beginning:
        reason = _rejection_of(choice)
        if reason is None:
            return Beginning.ANSWER
        self.reason = reason
        return Beginning.REJECTED


def rejection_in(answer: bytes) -> str | None:
    """The reason when a complete JSON answer is a rejection, else ``None``."""
    if REJECTION_PREFIX.encode() not in answer:
        return None
    fields = parsed(answer)
    choices = fields.get("choices") or []
    if len(choices) != 1 or _completion_tokens(fields) > 0:
        return None
    return _rejection_of(choices[0])


def _rejection_of(choice: dict[str, Any]) -> str | None:
    stop_reason = choice.get("stop_reason")
    if choice.get("finish_reason") not in _REJECTION_FINISHES or _has_content(choice):
        return None
    if not isinstance(stop_reason, str) or not stop_reason.startswith(REJECTION_PREFIX):
        return None
    return stop_reason[len(REJECTION_PREFIX) :]


def _has_content(choice: dict[str, Any]) -> bool:
    """Whether a choice, of a chunk or a whole answer, of either API, holds any output."""
    message = choice.get("delta") or choice.get("message") or {}
    said = any(value for key, value in message.items() if key not in _NOT_CONTENT)
    return said or bool(choice.get("text")) or bool(choice.get("token_ids"))


def _completion_tokens(fields: dict[str, Any]) -> int:
    usage = fields.get("usage") or {}
    tokens = usage.get("completion_tokens") or 0
    return tokens if isinstance(tokens, int) else 0
