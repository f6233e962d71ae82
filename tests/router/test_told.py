"""What a client lacks of an answer that is told again, however both tellings are cut (A5, B4)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from schedloom.router.continuation.told import Differs, Retold, Told
from schedloom.router.sse import data_of, parsed, split_events
from tests.router.retelling import TEXTS, TOKEN_IDS, TOOLS, Assembled, chunk, event, stream

SEEDS = 300


def events_of(*chunks: dict[str, Any]) -> bytes:
    return b"".join(event(one) for one in chunks)


def retelling_of(told: Told) -> Retold:
    return asyncio.run(Retold.of(told))


def told(*events: bytes) -> Told:
    told = Told()
    for one in events:
        told.add(one)
    return told


def continued(seed: int) -> bytes:
    """Two hand-backs: three tellings of one answer, each cut differently, each passed on as far as it is new."""
    dice = random.Random(seed)
    told, client = Told(), b""
    for name in ("first", "second", "third"):
        retold = retelling_of(told) if told.begun else None
        events = stream(name, dice)
        left = len(events) if name == "third" else dice.randrange(len(events) - 2)
        for one in events[:left]:
            news = one if retold is None else retold.rest_of(one)
            told.add(news)
            client += news
    return client


def test_two_seams_leave_no_trace() -> None:
    for seed in range(SEEDS):
        client = Assembled().add(continued(seed))
        assert len(client.heads) == 1, seed
        assert client.roles == ["assistant"] and client.prompts == [[1, 2, 3]], seed
        assert client.finishes == ["tool_calls"], seed
        assert client.texts == TEXTS, seed
        assert client.token_ids == TOKEN_IDS, seed
        assert [(tool["name"], tool["arguments"]) for tool in client.tools.values()] == TOOLS, seed
        assert all(tool["type"] == "function" and tool["id"] for tool in client.tools.values()), seed


def test_no_event_says_nothing_and_the_end_comes_once() -> None:
    for seed in range(SEEDS):
        events = list(split_events(continued(seed)))
        assert events[-1] == b"data: [DONE]\n\n" and events.count(events[-1]) == 1
        for one in events[:-2]:
            said = Assembled().add(one)
            assert said.roles or any(said.texts.values()) or said.token_ids or said.tools, one


def test_a_tool_calls_id_is_never_told_twice() -> None:
    call = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x'}}
    again = {"index": 0, "id": "b", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    retold = retelling_of(told(events_of(chunk("one", {"tool_calls": [call]}))))
    rest = parsed(data_of(retold.rest_of(events_of(chunk("two", {"tool_calls": [again]})))) or b"")
    assert rest == chunk("one", {"tool_calls": [{"index": 0, "function": {"arguments": '": 1}'}}]})


@pytest.mark.parametrize(
    "again",
    [
        [chunk("two", {"content": "Hallo"})],
        [chunk("two", {"content": "He"}), chunk("two", {"content": "y you"})],
        [chunk("two", {"content": "He"}), chunk("two", {}, "stop")],
        [chunk("two", {"content": 5})],
        [chunk("two", {}, "stop")],
    ],
)
def test_what_does_not_extend_the_delivered_is_refused(again: list[dict[str, Any]]) -> None:
    retold = retelling_of(told(events_of(chunk("one", {"content": "Hello"}))))
    with pytest.raises(Differs):
        retold.rest_of(events_of(*again))


def test_what_cannot_be_put_together_is_refused_only_when_it_must_be() -> None:
    strange = told(events_of(chunk("one", {"citations": {"a": 1}})))
    with pytest.raises(Differs):
        retelling_of(strange)


def test_usage_comments_and_errors_travel() -> None:
    retold = retelling_of(told(events_of(chunk("one", {"content": "He"}))))
    usage = chunk("two", {}) | {"choices": [], "usage": {"completion_tokens": 2}}
    error = event({"error": {"message": "no"}})
    assert b'"usage":{"completion_tokens":2}' in retold.rest_of(events_of(usage))
    assert b"chatcmpl-one" in retold.rest_of(events_of(usage))
    assert retold.rest_of(b": ping\n\n") == b": ping\n\n"
    assert retold.rest_of(error) == error


def test_completions_keep_their_text_field() -> None:
    def text(name: str, said: str, ids: list[int], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "text": said, "token_ids": ids, "finish_reason": finish}
        return {
            "id": name,
            "created": 1,
            "model": "m",
            "choices": [choice | {"prompt_token_ids": [9] if ids else None}],
        }

    retold = retelling_of(told(events_of(text("one", "He", [1, 2]))))
    rest = retold.rest_of(events_of(text("two", "He", [1, 2, 3]), text("two", "", [], "length")))
    assert rest.count(b'"text":""') == 2 and rest.count(b'"token_ids":[3]') == 1
    assert b"[9]" not in rest and b"two" not in rest


def test_long_streams_take_little_room_and_lose_nothing() -> None:
    words = [chunk("one", {"content": f"{number} "}) for number in range(3000)]
    long = told(*[events_of(word) for word in words])
    assert long.size < 80_000
    assert asyncio.run(long.by_field()) == {"content": "".join(f"{number} " for number in range(3000))}
