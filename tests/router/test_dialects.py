"""The APIs beside completions: served by one Decoder, each with its own way to end and to fail."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.conftest import Make
from tests.router.fakes import BROKEN, EVENTS, Answer, decoder, prefiller

pytestmark = pytest.mark.anyio

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
BODY: dict[str, Any] = {"model": "fake-model", "input": "hi", "messages": [], "stream": True}

BEGIN = {
    RESPONSES: b'event: response.created\ndata: {"type":"response.created"}\n\n',
    MESSAGES: b'event: message_start\ndata: {"type":"message_start"}\n\n',
}
END = {
    RESPONSES: b'event: response.completed\ndata: {"type":"response.completed"}\n\n',
    MESSAGES: b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
}


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a_stream_passes_unchanged_and_makes_an_owner(bench: Make, path: str) -> None:
    p, decoders = prefiller(), [decoder(0), decoder(1)]
    router = await bench(p, *decoders)
    for engine in decoders:
        engine.always = Answer(200, EVENTS, [BEGIN[path], END[path]])
    places = set()
    for _ in range(4):
        received = await router.client.post(path, BODY, {"X-Session-ID": "s"})
        assert (received.status, received.decision, received.body) == (200, "decode", BEGIN[path] + END[path])
        places.add(received.headers["x-schedloom-decoder"])
    assert len(places) == 1 and p.seen == []
    assert [seen.body for engine in decoders for seen in engine.seen] == [BODY] * 4
    assert not any(seen.is_local_attempt for engine in decoders for seen in engine.seen)


@pytest.mark.parametrize("rest", [[BROKEN], []])
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a_stream_that_breaks_ends_in_an_error_event_of_its_api(
    bench: Make, path: str, rest: list[Exception]
) -> None:
    d = decoder()
    router = await bench(prefiller(), d)
    d.script = [Answer(200, EVENTS, [BEGIN[path], *rest])]
    received = await router.client.post(path, BODY, {"X-Session-ID": "s"})
    begin, error = received.body[: len(BEGIN[path])], received.body[len(BEGIN[path]) :]
    assert begin == BEGIN[path]
    assert error.startswith(b'event: error\ndata: {"type":"error"') and error.endswith(b"\n\n")
    assert len(router.sessions) == 0


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_an_error_that_an_engine_tells_is_no_success(bench: Make, path: str) -> None:
    d = decoder()
    router = await bench(prefiller(), d)
    told = b'event: error\ndata: {"type":"error"}\n\n'
    d.script = [Answer(200, EVENTS, [BEGIN[path], told])]
    received = await router.client.post(path, BODY, {"X-Session-ID": "s"})
    assert received.body == BEGIN[path] + told
    assert len(router.sessions) == 0


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
async def test_token_services_belong_to_no_session(bench: Make, path: str) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    d.script = [Answer.of({"count": 3})]
    received = await router.client.post(path, {"model": "m", "prompt": "a"}, {"X-Session-ID": "s"})
    assert (received.status, received.json) == (200, {"count": 3})
    assert len(router.sessions) == 0 and p.seen == []
    assert "x-session-id" not in d.seen[0].headers


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, "/tokenize", "/detokenize"])
async def test_what_clients_may_not_say_is_removed_everywhere(bench: Make, path: str) -> None:
    d = decoder()
    router = await bench(prefiller(), d, api_keys=[{"key": "some-key-1", "tenant": "t"}])
    evil = {"kv_transfer_params": {"remote_host": "evil"}, "ec_transfer_params": {}, "schedloom_local_attempt": 1}
    body = {"model": "m", "prompt": "a", "vllm_xargs": evil, "request_id": "x", "cache_salt": "mine"} | evil
    assert (await router.client.post(path, body)).status == 401
    await router.client.post(path, body, {"Authorization": "Bearer some-key-1"})
    (seen,) = d.seen
    assert seen.body.pop("cache_salt") != "mine"
    assert {key: value for key, value in seen.body.items() if key != "cache_salt"} == {
        "model": "m",
        "prompt": "a",
        "vllm_xargs": {},
    }


@pytest.mark.parametrize("path", [MESSAGES, "/v1/messages/count_tokens"])
async def test_the_routers_errors_to_clients_of_messages_are_of_their_api(bench: Make, path: str) -> None:
    d = decoder()
    router = await bench(prefiller(), d, api_keys=[{"key": "some-key-1", "tenant": "t"}])
    key = {"x-api-key": "some-key-1"}
    refused = await router.client.post(path, BODY)
    wrong = await router.client.post(path, b"{", key)
    d.script = [Answer(200, EVENTS, [BROKEN])]
    failed = await router.client.post(path, BODY, key)
    asked_wrongly = await router.client.get(path)
    kinds = {401: "authentication_error", 400: "invalid_request_error", 502: "api_error", 405: "invalid_request_error"}
    for received in (refused, wrong, failed, asked_wrongly):
        error = received.json["error"]
        assert received.json == {
            "type": "error",
            "error": {"type": kinds.pop(received.status), "message": error["message"]},
        }
    assert kinds == {}
    d.script = [Answer.error(422, "as it came")]
    assert (await router.client.post(path, BODY, key)).json["error"]["message"] == "as it came"


async def test_an_engine_that_does_not_serve_an_api_says_so(bench: Make) -> None:
    d = decoder()
    router = await bench(prefiller(), d)
    d.script = [Answer.error(404, "Not Found")]
    assert (await router.client.post(RESPONSES, BODY)).status == 404
