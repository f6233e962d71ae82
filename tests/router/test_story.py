"""A hand-back is known in every form, and a model's own words are never taken for one (A5)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schedloom.core.continuation import HANDED_BACK_PREFIX, HandBack
from schedloom.router.continuation.story import handed_back, handed_back_in
from schedloom.router.failures import Failure
from tests.router.retelling import event

BACK = HandBack("no_blocks", (1, 2, 3), (4, 5))
SPOKEN = [
    {"index": 0, "delta": {"content": BACK.stop_reason}, "finish_reason": None},
    {"index": 0, "delta": {"content": f'"stop_reason":"{HANDED_BACK_PREFIX}'}, "finish_reason": "stop"},
    {"index": 0, "text": f'"{BACK.stop_reason}"', "finish_reason": "stop", "stop_reason": 7},
    {"index": 0, "message": {"content": BACK.stop_reason}, "finish_reason": "stop", "stop_reason": None},
    {"index": 0, "text": "", "finish_reason": "stop", "stop_reason": "schedloom:handed"},
]


def events_of(*choices: dict[str, Any]) -> bytes:
    return b"".join(event({"choices": [choice]}) for choice in choices)


@pytest.mark.parametrize("finish", ["stop", "tool_calls"])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_it_is_found_among_other_events(finish: str, place: int) -> None:
    word = {"index": 0, "delta": {"content": "a"}, "finish_reason": None}
    last = {"index": 0, "delta": {}, "finish_reason": finish, "stop_reason": BACK.stop_reason}
    before, after = events_of(*[word] * place), b"data: [DONE]\n\n"
    assert handed_back_in(before + events_of(last) + after) == (before, BACK)


@pytest.mark.parametrize("choice", SPOKEN)
def test_a_models_own_words_are_none(choice: dict[str, Any]) -> None:
    assert handed_back_in(events_of(choice)) is None
    assert handed_back(json.dumps({"choices": [choice]}).encode()) is None


def test_it_is_found_in_a_whole_answer() -> None:
    choice = {"index": 0, "text": "a", "finish_reason": "stop", "stop_reason": BACK.stop_reason}
    assert handed_back(json.dumps({"choices": [choice]}).encode()) == BACK


@pytest.mark.parametrize("damage", ["", "no_blocks:", "no_blocks:AAAA.BBBB", "no_blocks:%.%"])
def test_a_damaged_one_is_an_error(damage: str) -> None:
    choice = {"index": 0, "text": "", "finish_reason": "stop", "stop_reason": HANDED_BACK_PREFIX + damage}
    with pytest.raises(Failure) as raised:
        handed_back_in(events_of(choice))
    assert raised.value.status == 502 and b"bad_hand_back" in raised.value.body
