"""B9, SEC-1: a Prefiller pulls what the session's Decoder kept, if it is its prompt's. The engines are fakes."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from schedloom.router.fleet.changes import LOOK_SECONDS
from tests.router.conftest import Bench, Make
from tests.router.fakes import Answer, Seen, decoder, prefiller
from tests.router.keeping import BIDIRECTIONAL, Fleet, KeepingDecoder, tokens_of
from tests.router.test_membership import refusal
from tests.router.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

ON: dict[str, Any] = {"policies": [{"name": "pull_back"}]}
STREAMS = pytest.mark.parametrize("stream", [False, True])
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


async def started(make: Make, fleet: Fleet, **settings: Any) -> Bench:
    return await make(fleet.p, fleet.d, append=False, **ON | settings)


def history(*said: str) -> list[dict[str, Any]]:
    """A conversation in which the fake Decoder said what it says."""
    messages = list(HELLO)
    for one in said:
        messages += [{"role": "assistant", "content": " word word word"}, {"role": "user", "content": one}]
    return messages


@STREAMS
async def test_the_next_turn_pulls_what_was_kept(bench: Make, stream: bool) -> None:
    fleet = Fleet()
    router = await started(bench, fleet)
    turns = [
        await router.client.chat("s", messages=messages, stream=stream)
        for messages in (HELLO, history("more"), history("more", "and more"))
    ]
    assert [turn.decision for turn in turns] == ["pd", "pull_back", "pull_back"]
    assert [turn.text for turn in turns] == [" word word word"] * 3
    first = len(tokens_of({"messages": HELLO})) + len(" word word word")
    assert fleet.pulled[0] == first - 1 and len(fleet.pulled) == 2 and fleet.wrongs == []
    assert [seen.body["kv_transfer_params"]["remote_engine_id"] for seen in fleet.p.seen] == [None, "d", "d"]
    assert fleet.d.tokenized == 2
    assert router.count("tokenize_seconds_count") == 2


async def test_events_arrive_as_they_are_made(bench: Make) -> None:
    """Although they are read on their way, for what the Decoder keeps."""
    fleet, begun = Fleet(), asyncio.Event()
    router = await started(bench, fleet)
    router.client.on_start = begun.set

    async def slowly(seen: Seen) -> Answer:
        whole = fleet.d._ordinary(seen)
        return Answer(200, whole.kind, [*whole.steps[:2], begun, *whole.steps[2:]])

    fleet.d.script = [slowly]
    first = await asyncio.wait_for(router.client.chat("s", messages=HELLO, stream=True), PATIENCE_SECONDS)
    assert (first.text, first.decision) == (" word word word", "pd")
    assert (await router.client.chat("s", messages=history("more"))).decision == "pull_back"


@STREAMS
@pytest.mark.parametrize("asked", [None, True])
async def test_clients_see_no_more_than_they_asked_for(bench: Make, stream: bool, asked: bool | None) -> None:
    fleet = Fleet()
    router = await started(bench, fleet)
    more = {} if asked is None else {"return_token_ids": asked}
    received = await router.client.chat("s", stream=stream, **more)
    assert fleet.d.seen[0].body["return_token_ids"] is True
    assert b"10.0.0.8" not in received.body and b"remote_engine_id" not in received.body
    assert (b'"token_ids"' in received.body) is bool(asked)
    assert (b'"prompt_token_ids"' in received.body) is bool(asked)


CHANGED: dict[str, list[dict[str, Any]]] = {
    "another beginning": [{"role": "user", "content": "hellO"}, *history("more")[1:]],
    "another answer": [*HELLO, {"role": "assistant", "content": " word Word word"}, *history("more")[2:]],
    "a system prompt": [{"role": "system", "content": "x"}, *history("more")],
    "a shorter history": HELLO,
    "nothing of it": [{"role": "user", "content": "x" * 200}],
}


@pytest.mark.parametrize("messages", CHANGED.values(), ids=CHANGED)
async def test_what_does_not_go_on_where_the_turn_ended_is_computed(
    bench: Make, messages: list[dict[str, Any]]
) -> None:
    fleet = Fleet()
    router = await started(bench, fleet)
    await router.client.chat("s", messages=HELLO)
    received = await router.client.chat("s", messages=messages)
    assert (received.status, received.decision) == (200, "pd")
    assert fleet.pulled == [] and fleet.wrongs == []


UNPROVABLE: dict[str, dict[str, Any]] = {
    "an image": {"messages": [*history(), {"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}]},
    "documents": {"documents": [{"text": "x"}]},
    "a reasoning effort": {"reasoning_effort": "high"},
    "truncation": {"truncate_prompt_tokens": 5},
    "tools that are left out": {"tool_choice": "none"},
}


@pytest.mark.parametrize("more", UNPROVABLE.values(), ids=UNPROVABLE)
async def test_where_equal_ids_prove_nothing_nothing_is_pulled(bench: Make, more: dict[str, Any]) -> None:
    fleet = Fleet()
    router = await started(bench, fleet)
    for number in range(2):
        received = await router.client.chat("s", **{"messages": history(*["more"] * number)} | more)
        assert (received.status, received.decision) == (200, "pd")
    assert fleet.pulled == [] and fleet.d.tokenized == 0


async def test_kept_kv_is_fetched_once(bench: Make) -> None:
    """Two turns at once on top of the same one: the second computes."""
    fleet = Fleet()
    router = await started(bench, fleet)
    await router.client.chat("s", messages=HELLO)
    kept = dict(fleet.kept)
    fleet.d.script = [Answer.error(500)]
    assert (await router.client.chat("s", messages=history("more"))).status == 500
    assert (await router.client.chat("s", messages=history("more"))).decision == "pd"
    assert len(fleet.pulled) == len(kept) == 1


async def test_kv_is_not_pulled_when_it_is_about_to_expire(bench: Make) -> None:
    fleet = Fleet(kv_pinned_seconds=10.0)
    router = await started(bench, fleet, handoff_timeout_seconds=10)
    await router.client.chat("s", messages=HELLO)
    assert (await router.client.chat("s", messages=history("more"))).decision == "pd"
    assert fleet.pulled == []


@pytest.mark.parametrize("tokens", [[1, -1] * 40, [1, "a"] * 40, [1, None] * 40, [1, 2**70] * 40])
async def test_what_are_no_token_ids_goes_on_where_no_turn_ended(bench: Make, tokens: list[Any]) -> None:
    """Of a client's prompt or of an engine's answers."""
    fleet = Fleet()
    router = await started(bench, fleet)
    turns: list[str | list[Any]] = ["hello", tokens]
    for prompt in turns:
        answered = await router.client.post("/v1/completions", {"prompt": prompt}, {"X-Session-ID": "s"})
        assert (answered.status, answered.decision) == (200, "pd")
    honest = fleet.d._streamed

    def told(seen: Any, prompt: Any, output: Any, kept: Any, ids: bool) -> Any:
        return honest(seen, tokens, output, kept, ids)

    fleet.d._streamed = told  # type: ignore[assignment,method-assign]
    assert (await router.client.chat("t", messages=HELLO, stream=True)).status == 200
    assert fleet.pulled == [] and router.count("requests_total", route="pd", outcome="failed") == 0


async def test_a_restarted_decoder_kept_nothing(bench: Make) -> None:
    fleet = Fleet()
    router = await started(bench, fleet)
    await router.client.chat("s", messages=HELLO)
    assert fleet.d.contract is not None
    fleet.d.contract = fleet.d.contract.model_copy(update={"epoch": "e2"})
    await router.app.membership.look_at_all()
    assert (await router.client.chat("s", messages=history("more"))).decision == "pd"
    assert fleet.pulled == []


@pytest.mark.parametrize("version", ["0.32.0", "0.31.1+cpu", None])
async def test_streams_of_older_engines_tell_nothing_and_are_not_asked(bench: Make, version: str | None) -> None:
    fleet = Fleet(engine_version=version)
    router = await started(bench, fleet)
    turns: list[tuple[Any, Any, str]] = [
        (HELLO, True, "pd"),
        (HELLO, "true", "pd"),
        (history("more"), False, "pd"),
        (history("more", "and more"), True, "pull_back"),
    ]
    for messages, stream, decision in turns:
        received = await router.client.chat("s", messages=messages, stream=stream)
        assert received.decision == decision
    assert ["return_token_ids" in seen.body for seen in fleet.d.seen] == [False, False, True, False]


async def test_sessions_and_tenants_are_kept_apart(bench: Make) -> None:
    fleet = Fleet()
    router = await started(bench, fleet)
    await router.client.chat("s", messages=HELLO)
    assert (await router.client.chat("t", messages=history("more"))).decision == "pd"
    assert (await router.client.chat(None, messages=history("more"))).decision == "pd"
    assert (await router.client.chat("s", messages=history("more"), model="an-adapter")).decision == "pd"
    assert (await router.client.chat("s", messages=history("more"))).decision == "pull_back"


async def test_what_an_engine_cannot_tokenize_is_computed(bench: Make) -> None:
    fleet = Fleet()
    router = await started(bench, fleet)
    await router.client.chat("s", messages=HELLO)
    ordinary = fleet.d.answer

    async def broken(seen: Seen) -> Answer:
        return Answer.error(400) if seen.path == "/tokenize" else await ordinary(seen)

    fleet.d.answer = broken  # type: ignore[method-assign]
    assert (await router.client.chat("s", messages=history("more"))).decision == "pd"


async def test_token_ids_of_the_clients_own_need_no_tokenizer(bench: Make) -> None:
    fleet = Fleet()
    router = await started(bench, fleet)
    prompt = list(b"hello")
    for tokens in (prompt, [*prompt, *b" word word word", *b"more"]):
        body = {"model": "fake-model", "prompt": tokens}
        received = await router.client.post("/v1/completions", body, {"X-Session-ID": "s"})
    assert received.decision == "pull_back"
    assert fleet.d.tokenized == 0 and fleet.wrongs == []


async def test_a_prompt_that_ends_where_the_kept_kv_ends_is_computed(bench: Make) -> None:
    """A Prefiller has to compute something, or it would have no token to answer with."""
    fleet = Fleet()
    router = await started(bench, fleet)
    for tokens in ([*b"hello"], [*b"hello", *b" word word wor"]):
        body = {"model": "fake-model", "prompt": tokens}
        received = await router.client.post("/v1/completions", body, {"X-Session-ID": "s"})
    assert received.decision == "pd" and fleet.pulled == []


async def test_a_turned_away_attempt_falls_back_on_what_was_kept(bench: Make) -> None:
    fleet = Fleet(features=["append_prefill"])
    router = await bench(fleet.p, fleet.d, append=True, **ON)
    await router.client.chat("s", messages=HELLO)
    fleet.d.holds = False
    received = await router.client.chat("s", messages=history("more"))
    assert received.decision == "fallback" and len(fleet.pulled) == 1 and fleet.wrongs == []


async def test_without_the_policy_nothing_is_remembered(bench: Make) -> None:
    fleet = Fleet()
    router = await bench(fleet.p, fleet.d, append=False)
    for messages in (HELLO, history("more")):
        assert (await router.client.chat("s", messages=messages)).decision == "pd"
    assert fleet.pulled == [] and not any("return_token_ids" in seen.body for seen in fleet.d.seen)


@pytest.mark.parametrize("seed", range(40))
async def test_whatever_clients_do_to_their_histories_no_kv_is_wrong(bench: Make, seed: int) -> None:
    """Turns at once, branches, edits anywhere, sessions that trade their histories, engines that fail now and then."""
    chance, fleet = random.Random(seed), Fleet()
    router = await started(bench, fleet)
    histories = {session: list(HELLO) for session in "ab"}

    async def turn(session: str) -> None:
        messages = changed(chance, histories[chance.choice(session * 4 + "ab")])
        if chance.random() < 0.1:
            (fleet.p if chance.random() < 0.5 else fleet.d).script.append(Answer.error(500))
        received = await router.client.chat(session, messages=messages, stream=chance.random() < 0.5)
        assert b"internal_error" not in received.body
        if received.status == 200:
            histories[session] = [*messages, {"role": "assistant", "content": received.text}, *HELLO]

    for _ in range(12):
        await asyncio.gather(*[turn(chance.choice("ab")) for _ in range(chance.choice([1, 1, 2, 3]))])
    assert fleet.wrongs == []
    assert fleet.pulled


def changed(chance: random.Random, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As it was, most of the time; else with a letter changed, a turn left out, or two joined."""
    kind, place = chance.randrange(8), chance.randrange(len(messages))
    if kind == 0:
        text = messages[place]["content"]
        cut = chance.randrange(len(text))
        return [
            *messages[:place],
            {**messages[place], "content": text[:cut] + "#" + text[cut + 1 :]},
            *messages[place + 1 :],
        ]
    if kind == 1 and len(messages) > 2:
        return [*messages[:place], *messages[place + 1 :]]
    if kind == 2:
        return messages[: place + 1]
    return messages


async def pair(make: Make) -> tuple[Bench, Fleet, KeepingDecoder]:
    """A router whose session "s" has had a turn on the Decoder of a fleet that has another one since."""
    fleet = Fleet()
    other = KeepingDecoder(fleet, BIDIRECTIONAL, "http://d:2")
    router = await started(make, fleet)
    await router.client.chat("s", messages=HELLO)
    router.renew(fleet.p, fleet.d, other)
    while router.states["engine-2"] != "ready":
        await asyncio.sleep(0)
    return router, fleet, other


def held(engine: Any, gate: asyncio.Event) -> Any:
    async def later(seen: Seen) -> Answer:
        await gate.wait()
        answer: Answer = engine._ordinary(seen)
        return answer

    return later


async def test_kv_is_pulled_back_from_a_decoder_that_drains_and_has_not_drained_while_it_is(bench: Make) -> None:
    """A4: and a Decoder that has drained may be stopped, so that nobody pulls from it any more."""
    router, fleet, other = await pair(bench)
    stream, pull = asyncio.Event(), asyncio.Event()
    fleet.d.script, other.holds = [held(fleet.d, stream)], False
    busy = asyncio.create_task(router.client.chat("t", messages=history("else")))
    while not router.app.fleet.workers[1].in_flight:
        await asyncio.sleep(0)
    fleet.p.script = [held(fleet.p, pull)]
    router.renew(fleet.p, fleet.d, other, drain=fleet.d)
    asked = asyncio.create_task(router.client.chat("s", messages=history("more")))
    while fleet.p.script:
        await asyncio.sleep(0)
    stream.set()
    assert (await busy).headers["x-schedloom-decoder"] == "engine-1"
    await asyncio.sleep(2 * LOOK_SECONDS)
    assert router.states["engine-1"] == "draining" and router.in_flight == [1, 0, 0]
    pull.set()
    turn = await asked
    assert (turn.decision, turn.headers["x-schedloom-decoder"]) == ("pull_back", "engine-2")
    assert len(fleet.pulled) == 1 and fleet.wrongs == []
    while router.states["engine-1"] != "drained":
        await asyncio.sleep(0.01)
    assert (await router.client.chat("t", messages=history("else", "more"))).decision == "pd"


async def test_a_turn_whose_decoder_begins_to_drain_before_it_is_asked_goes_to_another(bench: Make) -> None:
    router, fleet, other = await pair(bench)
    gate = asyncio.Event()
    fleet.p.script = [held(fleet.p, gate)]
    asked = asyncio.create_task(router.client.chat("s", messages=history("more")))
    while fleet.p.script:
        await asyncio.sleep(0)
    before = len(fleet.d.seen)
    router.renew(fleet.p, fleet.d, other, drain=fleet.d)
    gate.set()
    turn = await asked
    assert (turn.decision, turn.headers["x-schedloom-decoder"]) == ("pull_back", "engine-2")
    assert len(fleet.d.seen) == before and fleet.wrongs == []


async def test_engines_that_move_kv_one_way_are_refused() -> None:
    one_way = [prefiller(), decoder()]
    assert "bidirectional_kv_xfer" in await refusal(one_way, append=False, **ON)
    mixed = [prefiller(**BIDIRECTIONAL), decoder()]
    assert "bidirectional_kv_xfer" in await refusal(mixed, append=False)
