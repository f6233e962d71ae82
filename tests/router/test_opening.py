"""Rejections are recognised in every form, and nothing else is taken for one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schedloom.core.wire import REJECTION_PREFIX
from schedloom.router.opening import Beginning, StreamOpening, rejection_in
from schedloom.router.sse import EventFramer
from tests.router.fakes import event_bytes, rejected_choice

ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
NO_TOKENS = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 0}}
TOKENS = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
FINISH = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": None}]}

REJECTIONS: dict[str, list[Any]] = {
    "chat, finish chunk dropped": [ROLE, "[DONE]"],
    "chat, finish chunk dropped, usage": [ROLE, NO_TOKENS, "[DONE]"],
    "completions, finish chunk dropped": ["[DONE]"],
    "completions, finish chunk dropped, usage": [NO_TOKENS, "[DONE]"],
    "chat, finish chunk": [ROLE, {"choices": [rejected_choice({"delta": {}})]}, "[DONE]"],
    "chat, finish chunk only": [{"choices": [rejected_choice({"delta": {"content": ""}})]}, "[DONE]"],
    "completions, finish chunk": [{"choices": [rejected_choice({"text": ""})]}, NO_TOKENS, "[DONE]"],
}


def chat(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


ANSWERS: dict[str, list[Any]] = {
    "content": [ROLE, chat(content="a"), FINISH, "[DONE]"],
    "reasoning": [ROLE, chat(reasoning_content="a")],
    "tool call": [ROLE, chat(tool_calls=[{"index": 0}])],
    "text": [{"choices": [{"index": 0, "text": "a", "finish_reason": None}]}],
    "token ids without text": [{"choices": [{"index": 0, "text": "", "token_ids": [5], "finish_reason": None}]}],
    "tokens without text": [ROLE, FINISH, "[DONE]"],
    "tokens told by usage": [ROLE, TOKENS, "[DONE]"],
    "usage in each chunk": [ROLE | {"usage": {"completion_tokens": 1}}],
    "a stop string like ours, with output": [
        {"choices": [{"index": 0, "text": "a", "finish_reason": "stop", "stop_reason": REJECTION_PREFIX + "x"}]}
    ],
}


def stream_of(events: list[Any]) -> bytes:
    return b"".join(step for step in map(event_bytes, events) if isinstance(step, bytes))


def beginning(events: list[Any], cut: int, local: bool = True) -> Beginning:
    stream = stream_of(events)
    framer, opening = EventFramer(), StreamOpening(local=local)
    for part in (stream[:cut], stream[cut:]):
        judged = opening.judge(framer.feed(part))
        if judged is not Beginning.UNDECIDED:
            return judged
    return Beginning.UNDECIDED


def length(events: list[Any]) -> int:
    return len(stream_of(events))


@pytest.mark.parametrize("events", REJECTIONS.values(), ids=REJECTIONS)
def test_a_rejection_is_known_wherever_the_stream_is_cut(events: list[Any]) -> None:
    for cut in range(length(events) + 1):
        assert beginning(events, cut) is Beginning.REJECTED


@pytest.mark.parametrize("events", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_is_never_taken_for_a_rejection(events: list[Any]) -> None:
    for cut in range(length(events) + 1):
        assert beginning(events, cut) is Beginning.ANSWER


def test_an_answer_is_undecided_before_its_first_content() -> None:
    assert beginning([ROLE, ": ping", NO_TOKENS], 0) is Beginning.UNDECIDED


@pytest.mark.parametrize("local", [False, True])
def test_an_error_in_place_of_an_answer_is_known(local: bool) -> None:
    assert beginning([{"error": {"code": 500}}, "[DONE]"], 0, local) is Beginning.ERROR


@pytest.mark.parametrize("events", REJECTIONS.values(), ids=REJECTIONS)
def test_only_a_local_attempt_can_be_rejected(events: list[Any]) -> None:
    assert beginning(events, 0, local=False) is Beginning.ANSWER


def whole(tokens: int = 0, **choice: Any) -> bytes:
    base = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "stop"}
    return json.dumps({"choices": [base | choice], "usage": {"completion_tokens": tokens}}).encode()


def test_a_whole_rejection_is_known() -> None:
    assert rejection_in(whole(stop_reason=REJECTION_PREFIX + "no_usable_prefix")) == "no_usable_prefix"
    assert rejection_in(whole(finish_reason="tool_calls", stop_reason=REJECTION_PREFIX + "x")) == "x"
    assert rejection_in(whole(message={"role": "assistant", "content": None}, stop_reason=REJECTION_PREFIX)) == ""


@pytest.mark.parametrize(
    "answer",
    [
        whole(),
        whole(stop_reason="other"),
        whole(tokens=1, stop_reason=REJECTION_PREFIX),
        whole(stop_reason=REJECTION_PREFIX, finish_reason="length"),
        whole(stop_reason=REJECTION_PREFIX, message={"content": "said"}),
        whole(message={"content": REJECTION_PREFIX}),
        b"not json " + REJECTION_PREFIX.encode(),
        b"[]",
    ],
)
def test_no_whole_answer_is_taken_for_a_rejection(answer: bytes) -> None:
    assert rejection_in(answer) is None
