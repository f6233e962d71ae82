"""What of a client's body reaches which engine."""

from __future__ import annotations

import json
import random
from typing import Any
from urllib.parse import unquote

import pytest

from schedloom.router.failures import Failure
from schedloom.router.requests.body import GenerationBody
from schedloom.router.requests.headers import session_value
from tests.router.conftest import Make
from tests.router.fakes import Answer, decoder, prefiller, transfer_parameters

INJECTED = {
    "do_remote_prefill": True,
    "remote_host": "evil.example",
    "remote_port": 1,
    "remote_block_ids": [9],
}
FORBIDDEN: dict[str, Any] = {
    "kv_transfer_params": INJECTED,
    "ec_transfer_params": INJECTED,
    "schedloom_local_attempt": 1,
    "schedloom": True,
    "schedloom_anything": {"a": 1},
    "request_id": "mine",
    "conversation_id": "c",
    "session_id": "s",
}
IN_EXTRA_ARGUMENTS: dict[str, Any] = {
    "kv_transfer_params": INJECTED,
    "ec_transfer_params": INJECTED,
    "schedloom_local_attempt": 1,
    "schedloom_other": 1,
    "session_id": "s",
}
CHAT: dict[str, Any] = {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}]}
ODD = b'{ "model":"m",\n "prompt" : "a\\u00e9\xc3\xa9", "temperature":1.0, "seed":1e2, "odd":{"x":[1,2]} }  '


def written(body: GenerationBody) -> dict[str, dict[str, Any]]:
    return {
        "prefiller": json.loads(body.for_prefiller()),
        "decoder": json.loads(body.for_decoder(transfer_parameters())),
        "local": json.loads(body.for_local_attempt()),
        "alone": json.loads(body.raw),
    }


@pytest.mark.parametrize("key", FORBIDDEN)
def test_forbidden_keys_reach_no_engine(key: str) -> None:
    forms = written(GenerationBody(json.dumps(CHAT | {key: FORBIDDEN[key]}).encode()))
    assert forms["decoder"] == CHAT | {"kv_transfer_params": transfer_parameters()}
    assert forms["local"] == CHAT | {"vllm_xargs": {"schedloom_local_attempt": 1}}
    assert forms["alone"] == CHAT
    assert forms["prefiller"]["kv_transfer_params"]["remote_host"] is None
    if key != "kv_transfer_params":
        assert key not in forms["prefiller"]


@pytest.mark.parametrize("escaped", [rb'"kv_transfer\u005fparams"', rb'"\u0073chedloom_x"', rb'"sche\u0064loom"'])
def test_an_escaped_key_is_the_same_key(escaped: bytes) -> None:
    body = GenerationBody(b'{"model":"m","prompt":"a",%b:{"remote_host":"evil"}}' % escaped)
    assert json.loads(body.raw) == {"model": "m", "prompt": "a"}


@pytest.mark.parametrize("key", IN_EXTRA_ARGUMENTS)
def test_forbidden_keys_do_not_hide_in_extra_arguments(key: str) -> None:
    extra = {"mine": 1, key: IN_EXTRA_ARGUMENTS[key]}
    forms = written(GenerationBody(json.dumps(CHAT | {"vllm_xargs": extra}).encode()))
    assert forms["alone"] == CHAT | {"vllm_xargs": {"mine": 1}}
    assert forms["decoder"]["vllm_xargs"] == forms["prefiller"]["vllm_xargs"] == {"mine": 1}
    assert forms["local"]["vllm_xargs"] == {"mine": 1, "schedloom_local_attempt": 1}


@pytest.mark.parametrize(
    "raw",
    [
        b'{"kv_transfer_params":{},"kv_transfer_params":{"a":1}}',
        b'{"vllm_xargs":{"kv_transfer_params":1},"vllm_xargs":{}}',
        b'{"vllm_xargs":{"schedloom_a":1,"schedloom_a":2}}',
        rb'{"conversation_id":"a","conversation\u005fid":"b"}',
        b'{"schedloom":1,"x":2,"schedloom":1}',
        b'{"model":"m","model":"m"}',
        b'{"model":"m","max_tokens":1,"max_tokens":100000}',
        b'{"":1,"":1}',
        b'{"messages":[{"role":"user","content":"a","role":"system"}]}',
        b'{"metadata":{"b":1,"b":2}}',
        b'{"a":[[{"b":[{"c":{},"c":[]}]}]]}',
        rb'{"a":1,"\u0061":1}',
        rb'{"a":1,"a":1,"text":"\u003a"}',
        rb'{"a":1,"text":"\u003A","a":1}',
        b'{ "a" : 1 , "a" : 1 }',
    ],
)
def test_a_key_given_twice_is_refused_anywhere(raw: bytes) -> None:
    """SEC-10."""
    with pytest.raises(Failure) as refused:
        GenerationBody(raw)
    error = json.loads(refused.value.body)["error"]
    assert (refused.value.status, error["code"]) == (400, "duplicate_key")
    assert "twice" in error["message"]


def test_a_long_key_given_twice_is_shown_in_part() -> None:
    with pytest.raises(Failure) as refused:
        GenerationBody(b'{"%b":1,"%b":2}' % (b"k" * 100_000, b"k" * 100_000))
    assert len(refused.value.body) < 500


def test_keys_of_their_own_are_no_duplicates_however_they_are_written() -> None:
    """SEC-10: seeded bodies, with and without a duplicate, in the styles that json writes and with colons escaped."""
    chance = random.Random(3)
    for _ in range(3_000):
        value, keys = _anything(chance, 3), list("ab:")
        styles: list[dict[str, Any]] = [{}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}]
        text = json.dumps({"w": value}, **chance.choice(styles))
        if chance.random() < 0.5:
            text = _with_colons_escaped(text, chance.choice("aA"))
        assert GenerationBody(text.encode()).fields == {"w": value}
        key = chance.choice(keys)
        twice = f'{{"{key}":{{"{key}":1}},"v":[{{"x":{text},"{key}":0,"{key}":{text}}}]}}'
        with pytest.raises(Failure):
            GenerationBody(twice.encode())


def _anything(chance: random.Random, depth: int) -> Any:
    kinds = ["text", "number", "list", "object"] if depth else ["text", "number"]
    match chance.choice(kinds):
        case "list":
            return [_anything(chance, depth - 1) for _ in range(chance.randrange(3))]
        case "object":
            return {_text(chance): _anything(chance, depth - 1) for _ in range(chance.randrange(4))}
        case "number":
            return chance.choice([0, -1, 1.5, 1e300, None, True, 2**63])
    return _text(chance)


def _text(chance: random.Random) -> str:
    return "".join(chance.choices('a:"\\é,{\n<', k=chance.randrange(4)))


def _with_colons_escaped(text: str, digit: str) -> str:
    return "".join(rf"\u003{digit}" if _is_in_a_string(text, at) else character for at, character in enumerate(text))


def _is_in_a_string(text: str, at: int) -> bool:
    """Whether a colon stands there that is none between a key and its value."""
    return text[at] == ":" and (text[at - 1] != '"' or _ends_escaped(text[: at - 1]))


def _ends_escaped(text: str) -> bool:
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"1",
        b'{"a":NaN}',
        b"{'a':1}",
        b'{"a":1}x',
        b'{"a":"\xff"}',
        b"\xef\xbb\xbf{}",
    ],
)
def test_what_is_not_a_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(Failure) as refused:
        GenerationBody(raw)
    error = json.loads(refused.value.body)["error"]
    assert refused.value.status == 400
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("extra", [[], "x", 1, True])
def test_extra_arguments_must_be_an_object(extra: Any) -> None:
    with pytest.raises(Failure):
        GenerationBody(json.dumps({"vllm_xargs": extra}).encode())


def test_deep_nesting_is_refused_and_not_a_crash() -> None:
    for depth in (300, 1000, 100_000):
        for key in ("request_id", "harmless"):
            deep = b'{"%b":1,"a":' % key.encode() + b"[" * depth + b"]" * depth + b"}"
            with pytest.raises(Failure) as refused:
                GenerationBody(deep).for_prefiller()
            assert refused.value.status == 400


def test_the_clients_bytes_travel_as_they_came() -> None:
    body = GenerationBody(ODD)
    assert body.raw == ODD
    inner = ODD.rstrip()[:-1]
    assert body.for_decoder({"a": 1}) == inner + b',"kv_transfer_params":{"a":1}}'
    assert body.for_local_attempt() == inner + b',"vllm_xargs":{"schedloom_local_attempt":1}}'


def test_an_empty_object_is_spliced_too() -> None:
    assert GenerationBody(b"{}").for_decoder({"a": 1}) == b'{"kv_transfer_params":{"a":1}}'


def test_null_extra_arguments_count_as_none() -> None:
    body = GenerationBody(b'{"model":"m","vllm_xargs":null}')
    assert json.loads(body.for_local_attempt()) == {
        "model": "m",
        "vllm_xargs": {"schedloom_local_attempt": 1},
    }


def test_a_prefiller_gets_one_token_to_make_and_nothing_that_could_stop_it_earlier() -> None:
    asked = CHAT | {
        "max_tokens": 500,
        "max_completion_tokens": 400,
        "min_tokens": 10,
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 1,
        "stop": ["x"],
        "stop_token_ids": [1],
        "ignore_eos": False,
        "logprobs": True,
        "top_logprobs": 5,
        "response_format": {"type": "json_object"},
        "structured_outputs": {"regex": "a"},
        "temperature": 0.5,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "truncate_prompt_tokens": 7,
        "unknown": 1,
    }
    forms = written(GenerationBody(json.dumps(asked).encode()))
    parameters = forms["prefiller"].pop("kv_transfer_params")
    assert parameters.pop("do_remote_decode") is True
    assert parameters.pop("do_remote_prefill") is False
    assert set(parameters.values()) == {None}
    assert forms["prefiller"] == CHAT | {
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "n": 1,
        "ignore_eos": True,
        "temperature": 0.5,
        "tools": asked["tools"],
        "truncate_prompt_tokens": 7,
        "unknown": 1,
    }
    assert forms["decoder"] == asked | {"kv_transfer_params": transfer_parameters()}


@pytest.mark.parametrize("prompt", ["a", [], ["a"], [[1]], [1, "a"], [1, -1], [1, 2**32], [1, 1.5], [1, None], [1, {}]])
def test_what_holds_more_than_token_ids_is_no_prompt_of_them(prompt: Any) -> None:
    assert GenerationBody(json.dumps({"prompt": prompt}).encode()).token_ids is None
    assert GenerationBody(b'{"prompt":[0,4294967295]}').token_ids == [0, 2**32 - 1]


@pytest.mark.anyio
async def test_headers_reach_engines_from_a_list_only(bench: Make) -> None:
    p, d = prefiller(), decoder(data_parallel_size=2)
    router = await bench(p, d, engine_api_key="engine-key")
    sent = {
        "Authorization": "Bearer client-key",
        "X-Api-Key": "client-key",
        "X-Data-Parallel-Rank": "1",
        "X-Request-Id": "mine",
        "X-Prefiller-Url": "http://evil",
        "X-Prefiller-Host-Port": "evil:1",
        "X-Vllm-Priority": "-9",
        "X-Session-Token": "other",
        "X-Forwarded-For": "10.0.0.1",
        "Host": "evil",
        "Content-Type": "text/evil",
        "Cookie": "a=b",
        "traceparent": "00-1-2-01",
        "X-Session-ID": "s",
        "Connection": "keep-alive",
    }
    for _ in range(2):
        assert (await router.client.post("/v1/chat/completions", CHAT, sent)).status == 200
    for seen in p.seen + d.seen:
        allowed = {"content-type", "x-request-id", "x-session-id", "traceparent", "authorization"}
        assert set(seen.headers) - {"x-data-parallel-rank"} == allowed
        assert seen.headers["authorization"] == "Bearer engine-key"
        assert seen.headers["x-request-id"] != "mine"
    assert d.seen[0].headers["x-data-parallel-rank"] == d.seen[1].headers["x-data-parallel-rank"]


@pytest.mark.anyio
async def test_the_clients_authorization_travels_only_where_configured(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    await router.client.post("/v1/chat/completions", CHAT, {"Authorization": "Bearer x"})
    assert "authorization" not in p.seen[0].headers
    router = await bench(p, d, forward_authorization=True)
    await router.client.post("/v1/chat/completions", CHAT, {"Authorization": "Bearer x"})
    await router.client.post("/v1/chat/completions", CHAT)
    await router.client.post("/v1/chat/completions", CHAT, {"x-api-key": "y"})
    assert [seen.headers.get("authorization") for seen in d.seen] == [None, "Bearer x", None, "Bearer y"]
    assert not any("x-api-key" in seen.headers for seen in p.seen + d.seen)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("session", "header"), [("plain-1", "plain-1"), ("a b", "a%20b"), ("50%", "50%25"), ("é\n", "%C3%A9%0A")]
)
async def test_any_session_key_travels_as_a_safe_header(bench: Make, session: str, header: str) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    await router.client.chat(conversation_id=session)
    await router.client.chat(conversation_id=session)
    assert {seen.headers["x-session-id"] for seen in p.seen + d.seen} == {header}
    assert d.seen[1].is_local_attempt


def test_no_session_key_can_leave_its_header_or_be_taken_for_another() -> None:
    chance = random.Random(5)
    for _ in range(5_000):
        session = "".join(chance.choices("%%4A\r\n\0:; é\u2028" + chr(chance.randrange(256)), k=6))
        value = session_value(session)
        assert all(0x21 <= byte <= 0x7E for byte in value)
        assert unquote(value.decode()) == session


@pytest.mark.anyio
async def test_a_session_key_has_a_longest_length(bench: Make) -> None:
    router = await bench(prefiller(), decoder())
    assert (await router.client.chat("x" * 256)).status == 200
    for refused in (await router.client.chat("x" * 257), await router.client.chat(conversation_id="x" * 257)):
        assert (refused.status, refused.json["error"]["code"]) == (400, "session_id_too_long")


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_transfer_parameters_of_an_answer_do_not_reach_the_client(bench: Make, stream: bool) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    finish = {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}
    leak = finish | {"kv_transfer_params": transfer_parameters()}
    d.script = [Answer.stream(leak, "[DONE]") if stream else Answer.of(leak)]
    received = await router.client.chat(stream=stream)
    assert received.text == "a"
    assert b"10.0.0.7" not in received.body


ASKED, SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


@pytest.mark.parametrize(
    ("fields", "follows_up"),
    [
        ({"messages": [ASKED]}, False),
        ({"messages": [ASKED, SAID, ASKED]}, True),
        ({"messages": [{"role": "system", "content": "assistant"}, ASKED]}, False),
        ({"messages": "assistant"}, False),
        ({"messages": [None, ["role", "assistant"], 3]}, False),
        ({"prompt": "assistant: hello"}, False),
        ({"input": "hi"}, False),
        ({"input": [SAID, ASKED]}, True),
        ({"input": "hi", "previous_response_id": "resp_1"}, True),
        ({"input": "hi", "previous_response_id": None}, False),
    ],
)
def test_a_follow_up_turn_is_known_by_the_answer_in_it(fields: dict[str, Any], follows_up: bool) -> None:
    assert GenerationBody(json.dumps({"model": "m", **fields}).encode()).follows_up() is follows_up
