"""A request that its engine hands back goes on elsewhere, and its client sees one exact answer (A5, B4)."""

from __future__ import annotations

import asyncio
import functools
import random
from contextlib import AsyncExitStack
from typing import Any

import pytest
from openai import AsyncOpenAI

from schedloom.core.continuation import HANDED_BACK_PREFIX, HandBack, Ticket
from schedloom.router.app import RouterApp
from schedloom.router.http.upstream import BrokenOff
from schedloom.router.laboratory.client import Received
from schedloom.router.settings import router_settings
from tests.router.conftest import Bench, Make
from tests.router.fakes import EVENTS, Answer, FakeEngine, decoder, prefiller
from tests.router.recomputing import PROMPT, TEXT, TOKENS, recomputing
from tests.router.retelling import TEXTS, TOKEN_IDS, TOOLS, Assembled, chunk, event, stream
from tests.router.sockets import asgi, served
from tests.router.waiting import in_one_of

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATHS = (CHAT, COMPLETIONS)
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
}
LENGTH = len(TOKENS)


async def asked(router: Bench, path: str = CHAT, session: str | None = None, **more: Any) -> Received:
    headers = {} if session is None else {"X-Session-ID": session}
    return await router.client.post(path, {"model": "fake-model"} | ASKED[path] | more, headers)


def wrongs(received: Received) -> list[str]:
    """What a client would complain about in a complete answer."""
    if received.status != 200:
        return [f"status {received.status}: {received.body!r}"]
    found = [] if received.text == TEXT else [f"text {received.text!r}"]
    found += ["a word between router and engines"] if b"schedloom" in received.body else []
    if received.headers["content-type"].startswith("application/json"):
        choice = received.json["choices"][0]
        return found + ([] if choice["finish_reason"] == "length" else [f"finish {choice}"])
    finishes = [choice["finish_reason"] for part in received.objects for choice in part["choices"]]
    found += [] if finishes[-1] == "length" and set(finishes[:-1]) == {None} else [f"finishes {finishes}"]
    found += [] if len({part["id"] for part in received.objects}) == 1 else ["several ids"]
    found += [] if received.events.count("[DONE]") == 1 and received.events[-1] == "[DONE]" else ["end marks"]
    return found


def marks(engine: FakeEngine) -> list[set[str]]:
    return [set(seen.body.get("vllm_xargs") or ()) for seen in engine.seen]


CONTINUABLE, RESUMED = "schedloom_continuable", "schedloom_resume"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
async def test_the_seam_is_nowhere_to_be_seen(bench: Make, path: str, streamed: bool, at_once: bool) -> None:
    """Wherever it lies: before, between and within characters, and at the very end."""
    p, first, second = prefiller(), recomputing(0), recomputing(1)
    router = await bench(p, first, second)
    first.at_once = second.at_once = at_once
    for left in range(1, LENGTH + 1):
        for engine in (p, first, second):
            engine.seen.clear()
        first.gives_back, second.gives_back = [left], [left]
        received = await asked(router, path, stream=streamed)
        assert wrongs(received) == [], left
        assert sorted(map(len, [*marks(first), *marks(second)])) == [1, 2, 2]
        told = [seen.body["vllm_xargs"].get(RESUMED) for seen in [*first.seen, *second.seen]]
        tickets = [Ticket.read(ticket) for ticket in told if ticket is not None]
        assert tickets == [HandBack("", PROMPT, TOKENS[:left]).ticket] * 2
        assert [seen.body.get("prompt") for seen in p.seen[1:]] == [[*PROMPT, *TOKENS[:left]]] * 2
        assert {seen.path for seen in p.seen[1:]} == {COMPLETIONS}
    assert router.count("handed_back_total") == router.count("continuations_total", result="continued") == 2 * LENGTH


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("usage", [False, True])
async def test_token_ids_and_usage_are_of_one_answer(bench: Make, path: str, streamed: bool, usage: bool) -> None:
    p, d = prefiller(), recomputing(0, 4, 9, 9)
    router = await bench(p, d)
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if usage and streamed else {}
    received = await asked(router, path, stream=streamed, return_token_ids=True, **options)
    assert wrongs(received) == []
    parts = received.objects if streamed else [received.json]
    choices = [choice for part in parts for choice in part["choices"]]
    assert [token for choice in choices for token in choice.get("token_ids") or ()] == list(TOKENS)
    told = [one["prompt_token_ids"] for one in [*parts, *choices] if one.get("prompt_token_ids")]
    assert told == ([list(PROMPT)] if streamed else [])
    used = [part["usage"]["completion_tokens"] for part in parts if part.get("usage")]
    assert used == ([LENGTH] if usage or not streamed else [])
    assert len(d.seen) == 4


async def test_what_the_decoder_is_told_is_the_clients_own_body(bench: Make) -> None:
    p, d = prefiller(), recomputing(0, 3)
    router = await bench(p, d)
    raw = b'{"model": "fake-model",  "prompt": "hi", "temperature": 0.50}'
    assert wrongs(await router.client.post(COMPLETIONS, raw)) == []
    first, second = d.seen
    assert first.raw.startswith(raw[:-1]) and second.raw.startswith(raw[:-1])
    assert first.body["vllm_xargs"] == {CONTINUABLE: 1}
    assert second.body["kv_transfer_params"]["do_remote_prefill"] is True
    to_prefiller = p.seen[1].body
    assert (to_prefiller["max_tokens"], to_prefiller["stream"], to_prefiller["model"]) == (1, False, "fake-model")
    assert to_prefiller["kv_transfer_params"]["do_remote_decode"] is True
    assert p.seen[1].headers["x-request-id"] == second.headers["x-request-id"] != first.headers["x-request-id"]


async def test_a_tenants_salt_and_extra_arguments_travel_with_the_tokens(bench: Make) -> None:
    p, d = prefiller(), recomputing(0, 3)
    router = await bench(p, d, api_keys=[{"key": "a-secret-key", "tenant": "t"}])
    body = {"model": "fake-model", "prompt": "hi", "vllm_xargs": {"job_class": "batch", "schedloom_resume": "x"}}
    received = await router.client.post(COMPLETIONS, body, {"Authorization": "Bearer a-secret-key"})
    assert wrongs(received) == []
    salts = {seen.body["cache_salt"] for engine in (p, d) for seen in engine.seen}
    assert len(salts) == 1 and len(p.seen) == len(d.seen) == 2
    assert p.seen[1].body["vllm_xargs"] == {"job_class": "batch"}
    assert d.seen[0].body["vllm_xargs"] == {"job_class": "batch", CONTINUABLE: 1}


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_is_handed_back_so_often_and_then_no_more(bench: Make, streamed: bool) -> None:
    p, d = prefiller(), recomputing(0, *range(2, 20))
    router = await bench(p, d, max_continuations=3)
    received = await asked(router, stream=streamed)
    assert wrongs(received) == []
    assert marks(d) == [{CONTINUABLE}, {CONTINUABLE, RESUMED}, {CONTINUABLE, RESUMED}, {RESUMED}]
    assert len(p.seen) == 4 and router.count("handed_back_total") == 3


async def test_nothing_is_marked_where_nobody_continues(bench: Make) -> None:
    p, plain, able = prefiller(), decoder(0), recomputing(1)
    router = await bench(p, plain, able)
    for choices in (1, 2):
        for _ in range(4):
            await asked(router, n=choices)
    assert {frozenset(one) for one in marks(plain)} == {frozenset()}
    assert {frozenset(one) for one in marks(able)} == {frozenset(), frozenset({CONTINUABLE})}
    assert not any(marks(p))


async def test_a_stream_behind_a_parser_that_leaves_seams_is_not_marked(bench: Make) -> None:
    p, d = prefiller(), recomputing(0)
    assert d.contract is not None
    d.contract = d.contract.model_copy(update={"reasoning_parser": "ernie45"})
    router = await bench(p, d)
    for streamed in (True, False):
        await asked(router, stream=streamed)
    assert marks(d) == [set(), {CONTINUABLE}]


async def test_continuations_can_be_switched_off(bench: Make) -> None:
    p, d = prefiller(), recomputing(0, 3)
    router = await bench(p, d, max_continuations=0)
    assert wrongs(await asked(router)) == [] and marks(d) == [set()]


@pytest.mark.parametrize("streamed", [False, True])
async def test_without_output_the_ordinary_way_is_taken_again(bench: Make, streamed: bool) -> None:
    p, d = prefiller(), recomputing(0, 0)
    router = await bench(p, d)
    assert wrongs(await asked(router, stream=streamed)) == []
    assert marks(d) == [{CONTINUABLE}, {CONTINUABLE}]
    assert [seen.path for seen in p.seen] == [CHAT, CHAT]
    assert router.count("continuations_total", result="continued") == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_local_attempt_that_is_handed_back_keeps_its_decision(bench: Make, streamed: bool) -> None:
    p, first, second = prefiller(), recomputing(0), recomputing(1)
    router = await bench(p, first, second)
    begun = await asked(router, session="s", stream=streamed)
    owner = first if first.seen else second
    owner.gives_back = [5]
    turn = await asked(router, session="s", stream=streamed)
    assert wrongs(turn) == [] and turn.decision == "append"
    assert marks(owner)[-1] == {CONTINUABLE, "schedloom_local_attempt"}
    assert router.count("local_attempt_results_total", result="hit") == 1
    after = await asked(router, session="s", stream=streamed)
    assert after.decision == "append"
    assert after.headers["x-schedloom-decoder"] != begun.headers["x-schedloom-decoder"]
    if not streamed:
        assert turn.headers["x-schedloom-decoder"] == after.headers["x-schedloom-decoder"]


def events_of(*choices: dict[str, Any]) -> list[Any]:
    return [event({"id": "x", "created": 1, "model": "m", "choices": [choice]}) for choice in choices]


WORD = {"index": 0, "delta": {"content": "Gr"}, "finish_reason": None}
STOP_REASON = HandBack("preempted", PROMPT, TOKENS[:4]).stop_reason
GIVEN_BACK = {"index": 0, "delta": {"content": "�"}, "finish_reason": "stop", "stop_reason": STOP_REASON}
TROUBLES = {
    "the Prefiller fails": (Answer.error(500, "no room"), None, "no room"),
    "the Prefiller is full": (Answer.error(503, "full", headers=[(b"retry-after", b"3")]), None, "full"),
    "the Prefiller refuses": (Answer.error(400, "too long"), None, "too long"),
    "the Prefiller keeps nothing": (Answer.of({"kv_transfer_params": None}), None, "transfer parameters"),
    "the Decoder fails": (None, Answer.error(500, "dead"), "dead"),
    "the Decoder is lost": (None, Answer(200, EVENTS, [BrokenOff("lost")]), "broke off"),
    "the Decoder says an error": (None, Answer.stream({"error": {"message": "kv load", "code": 500}}), "kv load"),
    "the Decoder says nothing": (None, Answer.stream("[DONE]"), "turned it away"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_continuation_that_fails_ends_in_a_clear_error(bench: Make, trouble: str, streamed: bool) -> None:
    """Two dispatches, whatever happens, and no third."""
    at_prefiller, at_decoder, says = TROUBLES[trouble]
    p, first, second = prefiller(), recomputing(0, 4), recomputing(1, 4)
    router = await bench(p, first, second)
    ordinary = Answer.of({"kv_transfer_params": {"do_remote_prefill": True}})
    p.script = [ordinary, fresh(at_prefiller) if at_prefiller is not None else ordinary]

    async def give_back_and_fail(seen: Any) -> Answer:
        for engine in (first, second):
            engine.script, engine.always = [], None if at_decoder is None else fresh(at_decoder)
        return Answer(200, EVENTS, [*events_of(WORD, GIVEN_BACK)]) if streamed else whole(GIVEN_BACK)

    first.script, second.script = [give_back_and_fail], [give_back_and_fail]
    received = await asked(router, stream=streamed)
    error = received.objects[-1]["error"] if streamed else received.json["error"]
    assert says in error["message"] and b"schedloom" not in received.body
    if streamed:
        assert received.text == "Gr" and "[DONE]" not in received.events
    elif "full" in says:
        assert (received.status, received.headers["retry-after"]) == (503, "3")
    else:
        assert received.status == 502
    assert len(p.seen) == 2 and len(first.seen) + len(second.seen) == (1 if at_prefiller else 2)
    assert router.count("continuations_total", result="failed") == router.count("handed_back_total") == 1


async def test_a_stream_of_which_nothing_was_delivered_ends_in_a_status(bench: Make) -> None:
    p, d = prefiller(), recomputing(0)
    router = await bench(p, d)
    p.script = [Answer.of({"kv_transfer_params": {"do_remote_prefill": True}}), Answer.error(503, "full")]
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    d.script = [Answer(200, EVENTS, [b"".join(events_of(role, GIVEN_BACK))])]
    received = await asked(router, stream=True)
    assert (received.status, received.json["error"]["code"]) == (503, "continuation_failed")


def fresh(answer: Answer) -> Answer:
    return Answer(answer.status, answer.kind, list(answer.steps), answer.headers)


def whole(choice: dict[str, Any]) -> Answer:
    message = {"role": "assistant", "content": "Gr"}
    return Answer.of({"id": "x", "choices": [{**choice, "message": message}], "usage": {"completion_tokens": 4}})


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_refused_ticket_is_an_error_and_no_second_fallback(bench: Make, streamed: bool) -> None:
    p, d = prefiller(), recomputing(0)
    router = await bench(p, d)
    other = dict(GIVEN_BACK, stop_reason=HandBack("preempted", (1, 2), TOKENS[:4]).stop_reason)
    d.script = [Answer(200, EVENTS, events_of(WORD, other)) if streamed else whole(other)]
    received = await asked(router, stream=streamed)
    error = received.objects[-1]["error"] if streamed else received.json["error"]
    assert error["code"] == "continuation_failed" and "turned it away" in error["message"]
    assert streamed or "prompt_differs" in error["message"]
    assert len(d.seen) == 2 and len(p.seen) == 2


async def test_a_late_hand_over_of_a_continuation_is_an_error(bench: Make) -> None:
    p, d = prefiller(), recomputing(0, 4)
    router = await bench(p, d)

    async def late(seen: Any) -> Answer:
        router.upstream.too_late = 1
        return whole(GIVEN_BACK)

    d.script = [late]
    received = await asked(router)
    assert (received.status, received.json["error"]["code"]) == (504, "continuation_failed")
    assert len(d.seen) == 1 and len(p.seen) == 2


async def test_an_answer_that_differs_breaks_the_stream_off(bench: Make) -> None:
    p, d = prefiller(), recomputing(0)
    router = await bench(p, d)
    otherwise = {"index": 0, "delta": {"content": "Hello"}, "finish_reason": None}
    d.script = [Answer(200, EVENTS, events_of(WORD, GIVEN_BACK)), Answer(200, EVENTS, events_of(otherwise))]
    received = await asked(router, stream=True)
    assert received.text == "Gr" and received.objects[-1]["error"]["code"] == "continuation_differs"
    assert router.count("continuations_total", result="failed") == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_damaged_hand_back_is_an_error(bench: Make, streamed: bool) -> None:
    p, d = prefiller(), recomputing(0)
    router = await bench(p, d)
    damaged = dict(GIVEN_BACK, stop_reason=HANDED_BACK_PREFIX + "preempted:AAAA")
    d.script = [Answer(200, EVENTS, events_of(WORD, damaged)) if streamed else whole(damaged)]
    received = await asked(router, stream=streamed)
    error = received.objects[-1]["error"] if streamed else received.json["error"]
    assert error["code"] == "bad_hand_back" and len(d.seen) == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_models_own_words_hand_nothing_back(bench: Make, streamed: bool) -> None:
    p, d = prefiller(), recomputing(0)
    router = await bench(p, d)
    words = f'"{HANDED_BACK_PREFIX}preempted:' + STOP_REASON
    said = {"index": 0, "delta": {"content": words}, "finish_reason": None}
    end = {"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": None}
    events = [*events_of(said, end), b"data: [DONE]\n\n"]
    message = {"index": 0, "finish_reason": "stop", "stop_reason": None, "message": {"content": words}}
    d.script = [Answer(200, EVENTS, events) if streamed else Answer.of({"choices": [message]})]
    received = await asked(router, stream=streamed)
    assert received.text == words and len(d.seen) == 1
    assert router.count("handed_back_total") == 0


@pytest.mark.parametrize("more", [{"stop": STOP_REASON}, {"seed": 5}])
@pytest.mark.parametrize("streamed", [False, True])
async def test_what_is_not_marked_is_never_taken_for_handed_back(
    bench: Make, more: dict[str, Any], streamed: bool
) -> None:
    """A client's own stop string could look the same: such requests are not marked."""
    p, d = prefiller(), recomputing(0)
    router = await bench(p, d)
    events = [*events_of(WORD, GIVEN_BACK), b"data: [DONE]\n\n"]
    d.script = [Answer(200, EVENTS, events) if streamed else whole(GIVEN_BACK)]
    received = await asked(router, stream=streamed, **more)
    assert received.status == 200 and len(d.seen) == 1 and marks(d) == [set()]
    assert STOP_REASON.encode() in received.body


def cut_short(name: str, dice: random.Random, left: int) -> Answer:
    """A stream of reasoning, content and tool calls that is handed back somewhere."""
    end = chunk(name, {"content": "�"}, "tool_calls", token_ids=[1000]) | {"id": f"chatcmpl-{name}"}
    end["choices"][0]["stop_reason"] = STOP_REASON
    steps = [*stream(name, dice)[:left], event(end), b"data: [DONE]\n\n"]
    return Answer(200, EVENTS, steps)


async def test_tool_calls_and_reasoning_go_on_however_they_are_cut(bench: Make) -> None:
    p, d = prefiller(), recomputing(0)
    router = await bench(p, d)
    for seed in range(60):
        dice = random.Random(seed)
        begun = [cut_short(name, dice, dice.randrange(1, 12)) for name in ("first", "second")]
        d.script = [*begun, Answer(200, EVENTS, stream("third", dice))]
        received = await asked(router, stream=True)
        client = Assembled().add(received.body)
        assert len(client.heads) == 1 and client.finishes == ["tool_calls"], seed
        assert client.texts == TEXTS, seed
        assert client.token_ids == TOKEN_IDS, seed
        assert [(tool["name"], tool["arguments"]) for tool in client.tools.values()] == TOOLS, seed


@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_a_client_that_leaves_ends_its_continuation(bench: Make, where: str) -> None:
    p, d = prefiller(), recomputing(0)
    router = await bench(p, d)
    never = asyncio.Event()

    async def hang(seen: Any) -> Answer:
        router.client.leave.set()
        await never.wait()
        raise AssertionError

    ordinary = Answer.of({"kv_transfer_params": {"do_remote_prefill": True}})
    p.script = [ordinary, hang if where == "prefill" else ordinary]
    d.script = [Answer(200, EVENTS, events_of(WORD, GIVEN_BACK)), hang]
    await asked(router, stream=True)
    assert (p if where == "prefill" else d).cancelled == 1
    assert router.count("continuations_total", result="failed") == router.count("handed_back_total") == 1


@pytest.mark.parametrize("streamed", [False, True])
@in_one_of(5)
async def test_the_deadline_covers_continuations_too(bench: Make, streamed: bool) -> None:
    p, d = prefiller(), recomputing(0)
    router = await bench(p, d, request_timeout_seconds=0.1)
    first = Answer(200, EVENTS, events_of(WORD, GIVEN_BACK)) if streamed else whole(GIVEN_BACK)
    d.script = [first, Answer(200, EVENTS, [asyncio.Event()])]
    received = await asked(router, stream=streamed)
    error = received.objects[-1]["error"] if streamed else received.json["error"]
    assert error["code"] == "request_timeout" and received.ended


async def test_the_openai_client_sees_one_answer() -> None:
    """Over sockets, whatever the pieces in which the hand-back arrives."""
    async with AsyncExitStack() as stack:
        engines: list[FakeEngine] = [prefiller(), recomputing(0, 3, 9), recomputing(1, 3, 9)]
        urls = [await stack.enter_async_context(served(asgi(engine))) for engine in engines]
        app = RouterApp(router_settings({"workers": [{"url": url} for url in urls]}))
        await app.start()
        stack.push_async_callback(app.close)
        address = await stack.enter_async_context(served(app))
        client = await stack.enter_async_context(AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0))
        create = functools.partial(client.chat.completions.create, model="fake-model")
        messages: Any = ASKED[CHAT]["messages"]
        told: Any = await create(messages=messages, stream=True)
        chunks = [chunk async for chunk in told]
        assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == TEXT
        assert len({chunk.id for chunk in chunks}) == 1
        assert (await create(messages=messages)).choices[0].message.content == TEXT
        assert app.metrics.registry.get_sample_value("schedloom_router_handed_back_total") == 4


async def test_another_decoder_is_preferred_and_the_least_busy(bench: Make) -> None:
    p, decoders = prefiller(), [recomputing(number) for number in range(3)]
    router = await bench(p, *decoders)
    busy, giver, idle = router.app.fleet.decoders
    by_origin = {engine.origin: engine for engine in decoders}
    with busy.serving(0), busy.serving(0), idle.serving(0):
        by_origin[giver.origin].gives_back = [3]
        assert wrongs(await asked(router)) == []
    assert [len(by_origin[worker.origin].seen) for worker in (busy, giver, idle)] == [0, 1, 1]
