"""R8: how many tokens and choices a request may ask for, and how many it gets when it names none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schedloom.core.errors import ConfigurationError
from schedloom.router.settings import router_settings
from tests.router.conftest import Make
from tests.router.fakes import decoder, prefiller

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
KEYS = [
    (CHAT, "max_tokens"),
    (CHAT, "max_completion_tokens"),
    (CHAT, "min_tokens"),
    (COMPLETIONS, "max_tokens"),
    (COMPLETIONS, "min_tokens"),
    (RESPONSES, "max_output_tokens"),
    (MESSAGES, "max_tokens"),
]
GIVEN = [
    (CHAT, "max_completion_tokens"),
    (COMPLETIONS, "max_tokens"),
    (RESPONSES, "max_output_tokens"),
    (MESSAGES, "max_tokens"),
]
PROMPT = {"model": "fake-model", "messages": [], "prompt": "a", "input": "a"}
NO_NUMBERS = [True, False, "5", "many", 1.5, -1, [1], {"a": 1}]


@pytest.mark.parametrize(("path", "key"), KEYS)
@pytest.mark.parametrize("value", [101, 2**70, 100.5, 1e300, *NO_NUMBERS])
async def test_more_tokens_than_may_be_made_are_refused(bench: Make, path: str, key: str, value: Any) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d, max_output_tokens=100)
    refused = await router.client.post(path, PROMPT | {key: value})
    assert refused.status == 400 and p.seen + d.seen == []
    error = refused.json["error"]
    assert error["message"] == f"{key} must be a whole number from 0 to 100."
    assert error["type"] == "invalid_request_error"
    if path == MESSAGES:
        assert refused.json["type"] == "error"
    else:
        assert (error["code"], error["param"]) == ("invalid_value", key)
    assert router.count("requests_total", route="none", outcome="refused") == 1


@pytest.mark.parametrize(("path", "key"), KEYS)
@pytest.mark.parametrize("value", [0, 1, 100, 100.0])
async def test_as_many_as_may_be_made_travel_as_they_came(bench: Make, path: str, key: str, value: Any) -> None:
    d = decoder()
    router = await bench(prefiller(), d, max_output_tokens=100)
    await router.client.post(path, PROMPT | {key: value})
    assert d.seen[0].body[key] == value


@pytest.mark.parametrize("key", ["max_tokens", "max_completion_tokens"])
async def test_every_place_counts_and_not_only_the_first(bench: Make, key: str) -> None:
    router = await bench(prefiller(), decoder(), max_output_tokens=100)
    asked = PROMPT | {"max_tokens": 1, "max_completion_tokens": 1} | {key: 101}
    assert (await router.client.post(CHAT, asked)).status == 400


@pytest.mark.parametrize(("path", "key"), GIVEN)
@pytest.mark.parametrize("is_null", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_who_names_no_number_is_given_the_default(
    bench: Make, path: str, key: str, is_null: bool, stream: bool
) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d, default_output_tokens=70, max_output_tokens=100)
    asked = PROMPT | {"stream": stream} | ({key: None} if is_null else {})
    assert (await router.client.post(path, asked)).status == 200
    (seen,) = d.seen
    assert seen.raw.count(key.encode()) == 1 and seen.body[key] == 70
    assert {name: seen.body[name] for name in PROMPT} == PROMPT
    assert all(to_prefill.body["max_tokens"] == 1 for to_prefill in p.seen)
    assert all(to_prefill.body.get("max_completion_tokens", 1) == 1 for to_prefill in p.seen)


@pytest.mark.parametrize("salted", [False, True])
async def test_the_default_stands_beside_all_else_that_the_router_says(bench: Make, salted: bool) -> None:
    d = decoder()
    keys = [{"key": "a-long-secret", "tenant": "t"}] if salted else []
    router = await bench(prefiller(), d, default_output_tokens=70, api_keys=keys)
    for own in ({}, {"max_completion_tokens": None}, {"cache_salt": "mine"}, {"vllm_xargs": {"a": 1}}):
        for _ in range(2):
            await router.client.post(CHAT, PROMPT | own, {"Authorization": "Bearer a-long-secret", "X-Session-ID": "s"})
        for seen in d.seen:
            pairs: list[str] = []
            json.loads(seen.raw, object_pairs_hook=lambda found: pairs.extend(key for key, _ in found))  # noqa: B023
            assert len(pairs) == len(set(pairs)) and seen.body["max_completion_tokens"] == 70
            assert ("cache_salt" in seen.body) == (salted or "cache_salt" in own)
        assert d.seen[-1].is_local_attempt
        d.seen.clear()


async def test_a_largest_number_is_the_default_where_engines_would_have_none(bench: Make) -> None:
    d = decoder()
    router = await bench(prefiller(), d, max_output_tokens=100)
    for path, key in GIVEN:
        for asked in (PROMPT, PROMPT | {key: None}):
            await router.client.post(path, asked)
            is_sixteen = path == COMPLETIONS and key not in asked
            assert d.seen[-1].body.get(key) == (None if is_sixteen else 100)


async def test_the_least_number_that_a_client_names_is_made(bench: Make) -> None:
    d = decoder()
    router = await bench(prefiller(), d, default_output_tokens=70)
    await router.client.post(CHAT, PROMPT | {"min_tokens": 90})
    assert d.seen[0].body["max_completion_tokens"] == 90


async def test_nothing_is_said_where_nothing_is_set(bench: Make) -> None:
    d = decoder()
    router = await bench(prefiller(), d)
    asked = PROMPT | {"max_tokens": "5", "min_tokens": -1}
    await router.client.post(CHAT, asked)
    assert {key: d.seen[0].body[key] for key in asked} == asked and "max_completion_tokens" not in d.seen[0].body


@pytest.mark.parametrize("key", ["n", "best_of"])
@pytest.mark.parametrize("value", [129, 2**70, 0, *NO_NUMBERS[1:]])
async def test_more_choices_than_may_be_asked_for_are_refused(bench: Make, key: str, value: Any) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    for path in (CHAT, COMPLETIONS):
        refused = await router.client.post(path, PROMPT | {key: value})
        assert (refused.status, refused.json["error"]["param"]) == (400, key)
        assert refused.json["error"]["message"] == f"{key} must be a whole number from 1 to 128."
    assert p.seen + d.seen == []


@pytest.mark.parametrize("key", ["n", "best_of"])
async def test_so_many_choices_are_served(bench: Make, key: str) -> None:
    router = await bench(prefiller(), decoder(), max_choices=3)
    for value, status in ((None, 200), (1, 200), (3, 200), (4, 400)):
        assert (await router.client.post(CHAT, PROMPT | {key: value})).status == status


def test_a_default_above_the_largest_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="default_output_tokens: it must be at most max_output_tokens"):
        router_settings({"workers": [{"url": "http://h:1"}], "default_output_tokens": 2, "max_output_tokens": 1})
