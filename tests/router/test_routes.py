"""Which engines a request reaches, and what each of them is told."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.conftest import Make
from tests.router.fakes import Answer, decoder, prefiller, transfer_parameters

pytestmark = pytest.mark.anyio

PATHS = ("/v1/chat/completions", "/v1/completions")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "fake-model", "prompt": "hi"},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_first_turn_goes_through_prefiller_and_decoder(bench: Make, path: str, stream: bool) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    received = await router.client.post(path, BODIES[path] | {"stream": stream}, {"X-Session-ID": "s"})
    assert (received.status, received.decision, received.text) == (200, "pd", " word word word")
    assert received.headers["x-schedloom-decoder"] == "engine-1"
    (to_p,), (to_d,) = p.seen, d.seen
    assert to_p.body["kv_transfer_params"]["do_remote_decode"] is True
    assert (to_p.body["max_tokens"], to_p.body["stream"], to_p.body["n"]) == (1, False, 1)
    assert to_d.body == BODIES[path] | {"stream": stream, "kv_transfer_params": transfer_parameters()}
    assert to_p.headers["x-session-id"] == to_d.headers["x-session-id"] == "s"
    assert to_p.headers["x-request-id"] == to_d.headers["x-request-id"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_follow_up_turn_is_appended_on_the_owner(bench: Make, path: str, stream: bool) -> None:
    p, decoders = prefiller(), [decoder(0), decoder(1)]
    router = await bench(p, *decoders)
    body = BODIES[path] | {"stream": stream}
    first = await router.client.post(path, body, {"X-Session-ID": "s"})
    for _ in range(5):
        turn = await router.client.post(path, body, {"X-Session-ID": "s"})
        assert (turn.status, turn.decision, turn.text) == (200, "append", " word word word")
        assert turn.headers["x-schedloom-decoder"] == first.headers["x-schedloom-decoder"]
    owner = next(engine for engine in decoders if engine.seen)
    assert len(p.seen) == 1
    assert [len(engine.seen) for engine in decoders if engine is not owner] == [0]
    for seen in owner.seen[1:]:
        assert seen.body == body | {"vllm_xargs": {"schedloom_local_attempt": 1}}
        assert "x-data-parallel-rank" not in seen.headers
    assert router.count("local_attempt_results_total", result="hit") == 5


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("finish_chunk", [False, True])
async def test_a_rejected_turn_falls_through_once(
    bench: Make, path: str, stream: bool, usage: bool, finish_chunk: bool
) -> None:
    p, d = prefiller(), decoder()
    d.finish_chunk = finish_chunk
    router = await bench(p, d)
    body = BODIES[path] | {"stream": stream}
    if usage and stream:
        body["stream_options"] = {"include_usage": True}
    await router.client.post(path, body, {"X-Session-ID": "s"})
    d.holds = False
    received = await router.client.post(path, body, {"X-Session-ID": "s"})
    assert (received.status, received.decision, received.text) == (200, "fallback", " word word word")
    local, after = d.seen[1:]
    assert local.is_local_attempt and "kv_transfer_params" not in local.body
    assert not after.is_local_attempt and after.body["kv_transfer_params"] == transfer_parameters()
    assert local.headers["x-request-id"] != after.headers["x-request-id"]
    assert local.headers["x-session-id"] == after.headers["x-session-id"] == "s"
    assert local.headers["x-request-id"].encode() not in received.body
    if stream:
        assert len({part["id"] for part in received.objects}) == 1
        roles = [c for part in received.objects for c in part["choices"] if c.get("delta", {}).get("role")]
        assert len(roles) == ("chat" in path)
        assert received.events.count("[DONE]") == 1
        tokens = [part["usage"]["completion_tokens"] for part in received.objects if part.get("usage")]
        assert tokens == ([3] if usage else [])
    assert router.count("local_attempt_results_total", result="rejected") == 1
    assert len(p.seen) == 2


async def test_without_a_session_there_is_no_local_attempt(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    for _ in range(3):
        assert (await router.client.chat()).decision == "pd"
    assert not any(seen.is_local_attempt for seen in d.seen)
    assert all("x-session-id" not in seen.headers for seen in p.seen + d.seen)


async def test_switched_off_a_session_makes_no_local_attempt(bench: Make) -> None:
    p, d = prefiller(), decoder(features=[])
    router = await bench(p, d, append=False)
    for _ in range(3):
        assert (await router.client.chat("s")).decision == "pd"


async def test_sessions_are_of_one_model_and_equal_to_the_letter(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    assert (await router.client.chat("s")).decision == "pd"
    assert (await router.client.chat("S")).decision == "pd"
    assert (await router.client.chat("s", model="an-adapter")).decision == "pd"
    assert (await router.client.chat("s")).decision == "append"


async def test_the_header_wins_over_conversation_id(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    assert (await router.client.chat(conversation_id="a")).decision == "pd"
    assert (await router.client.chat("b", conversation_id="a")).decision == "pd"
    assert (await router.client.chat("a", conversation_id="c")).decision == "append"
    assert all("conversation_id" not in seen.body for seen in p.seen + d.seen)


async def test_the_engines_own_session_id_comes_last_and_goes_by_header_too(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    assert (await router.client.chat(session_id="a")).decision == "pd"
    assert (await router.client.chat(session_id="a")).decision == "append"
    assert (await router.client.chat(session_id="a", conversation_id="b")).decision == "pd"
    assert (await router.client.chat("a", session_id="c", conversation_id="b")).decision == "append"
    sessions = [seen.headers["x-session-id"] for seen in d.seen]
    assert sessions == ["a", "a", "b", "a"] and not any("session_id" in seen.body for seen in p.seen + d.seen)


async def test_sessions_may_be_named_in_further_places_in_one_order(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d, session_names=["X-Chat", "$.metadata.chat", "$.user"])
    body = BODIES["/v1/completions"]
    asked: list[tuple[dict[str, str], dict[str, Any], str | None]] = [
        ({}, {"user": "u"}, "u"),
        ({}, {"user": "u", "metadata": {"chat": "m"}}, "m"),
        ({"x-chat": "h"}, {"user": "u", "metadata": {"chat": "m"}}, "h"),
        ({"x-chat": "h"}, {"session_id": "own"}, "own"),
        ({"x-chat": " "}, {"user": "u"}, "u"),
        ({}, {"user": 5, "metadata": ["chat"]}, None),
        ({}, {"metadata": {"chat": {"a": "b"}}}, None),
    ]
    for headers, more, session in asked:
        assert (await router.client.post("/v1/completions", body | more, headers)).status == 200
        assert d.seen[-1].headers.get("x-session-id") == session
        assert all(d.seen[-1].body[key] == value for key, value in more.items() if key != "session_id")
    assert (await router.client.post("/v1/completions", body, {"X-Chat": "u"})).decision == "append"
    assert (await router.client.post("/v1/completions", body | {"user": "x" * 257})).status == 400


@pytest.mark.parametrize("value", ["", None, 5, ["a"], {"a": 1}])
async def test_a_conversation_id_that_names_nothing_is_no_session(bench: Make, value: Any) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    for _ in range(2):
        assert (await router.client.chat(conversation_id=value)).decision == "pd"
    assert len(router.sessions) == 0
    assert all("conversation_id" not in seen.body for seen in p.seen + d.seen)


@pytest.mark.parametrize(
    "unusual",
    [
        {"n": 2},
        {"best_of": 3},
        {"use_beam_search": True},
        {"echo": True},
        {"prompt_logprobs": 0},
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
    ],
)
async def test_what_one_transfer_cannot_serve_goes_to_one_decoder(bench: Make, unusual: dict[str, Any]) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    body = BODIES["/v1/completions"] | unusual
    for _ in range(2):
        received = await router.client.post("/v1/completions", body, {"X-Session-ID": "s"})
        assert (received.status, received.decision) == (200, "decode")
    assert p.seen == []
    assert [seen.body for seen in d.seen] == [body, body]


@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2, 3], [[1, 2, 3]]])
async def test_one_prompt_is_split_whatever_its_form(bench: Make, prompt: Any) -> None:
    router = await bench(prefiller(), decoder())
    body = BODIES["/v1/completions"] | {"prompt": prompt}
    assert (await router.client.post("/v1/completions", body)).decision == "pd"


async def test_ranks_are_chosen_from_the_first_turn_and_kept(bench: Make) -> None:
    p, d = prefiller(), decoder(data_parallel_size=2)
    router = await bench(p, d)
    ranks = {}
    for session in "abcd":
        for _ in range(3):
            await router.client.chat(session)
        ranks[session] = {s.headers["x-data-parallel-rank"] for s in d.seen if s.headers["x-session-id"] == session}
    assert sorted(rank for chosen in ranks.values() for rank in chosen) == ["0", "0", "1", "1"]
    assert "x-data-parallel-rank" not in p.seen[0].headers


async def test_a_fallback_may_move_the_session(bench: Make) -> None:
    p, decoders = prefiller(), [decoder(0), decoder(1)]
    router = await bench(p, *decoders)
    first = await router.client.chat("s")
    for engine in decoders:
        engine.holds = False
    turns = [await router.client.chat("s") for _ in range(2)]
    assert {turn.decision for turn in turns} == {"fallback"}
    places = [turn.headers["x-schedloom-decoder"] for turn in (first, *turns)]
    for engine in decoders:
        engine.holds = True
    assert (await router.client.chat("s")).headers["x-schedloom-decoder"] == places[-1]
    assert len(set(places)) == 2


async def test_requests_spread_evenly(bench: Make) -> None:
    prefillers, decoders = [prefiller(0), prefiller(1)], [decoder(0), decoder(1), decoder(2)]
    router = await bench(*prefillers, *decoders)
    for number in range(12):
        await router.client.chat(f"s{number}")
    assert [len(engine.seen) for engine in prefillers] == [6, 6]
    assert [len(engine.seen) for engine in decoders] == [4, 4, 4]


async def test_an_answer_without_transfer_parameters_is_a_clear_error(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    nothings: list[dict[str, Any]] = [{}, {"kv_transfer_params": None}, {"kv_transfer_params": {}}]
    for nothing in nothings:
        p.script = [Answer.of(nothing)]
        received = await router.client.chat()
        assert received.status == 502
        assert "without transfer parameters" in received.json["error"]["message"]
    assert d.seen == []


async def test_no_event_of_a_stream_tells_where_engines_are(bench: Make) -> None:
    leak = {"choices": [], "kv_transfer_params": {"remote_host": "10.0.0.7"}}
    said = [{"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]} for word in ("one", "two")]
    p, d = prefiller(), decoder()
    d.script = [Answer.stream(*said, leak, "[DONE]")]
    router = await bench(p, d)
    received = await router.client.chat("s", stream=True)
    assert (received.status, received.text) == (200, "onetwo")
    assert b"10.0.0.7" not in received.body
