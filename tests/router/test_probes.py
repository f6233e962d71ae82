"""What routers of the field were found to do wrong, each as a probe of this one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.router.conftest import Make
from tests.router.fakes import BROKEN, EVENTS, Answer, decoder, event_bytes, prefiller
from tests.router.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio

WORD = {"id": "x", "choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]}


async def test_a_decoders_400_to_a_stream_is_a_400_with_its_body(bench: Make) -> None:
    d = decoder()
    router = await bench(prefiller(), d)
    d.script = [Answer.error(400, "max_tokens is too large")]
    received = await router.client.chat(stream=True)
    assert (received.status, received.headers["content-type"]) == (400, "application/json")
    assert received.json["error"]["message"] == "max_tokens is too large"


async def test_a_decoders_503_keeps_its_retry_after(bench: Make) -> None:
    d = decoder()
    router = await bench(prefiller(), d)
    d.script = [Answer.error(503, "full", headers=[(b"retry-after", b"9")])]
    received = await router.client.chat(stream=True)
    assert (received.status, received.headers["retry-after"]) == (503, "9")


async def test_an_owner_that_was_killed_costs_its_session_nothing(bench: Make) -> None:
    p, decoders = prefiller(), [decoder(0), decoder(1)]
    router = await bench(p, *decoders)
    await router.client.chat("s")
    next(engine for engine in decoders if engine.seen).reachable = False
    turns = [await router.client.chat("s", stream=bool(n % 2)) for n in range(4)]
    assert [(turn.status, turn.text) for turn in turns] == [(200, " word word word")] * 4
    assert [turn.decision for turn in turns] == ["fallback", "append", "append", "append"]


async def test_twelve_sessions_spread_over_two_decoders_and_stay(bench: Make) -> None:
    decoders = [decoder(0), decoder(1)]
    router = await bench(prefiller(), *decoders)
    homes: dict[str, set[str]] = {}
    for _ in range(3):
        for number in range(12):
            received = await router.client.chat(f"s{number}")
            homes.setdefault(f"s{number}", set()).add(received.headers["x-schedloom-decoder"])
    assert all(len(home) == 1 for home in homes.values())
    assert [len(engine.seen) for engine in decoders] == [18, 18]


async def test_a_stream_is_an_event_stream(bench: Make) -> None:
    router = await bench(prefiller(), decoder())
    received = await router.client.chat(stream=True)
    assert received.headers["content-type"].startswith("text/event-stream")


async def test_the_body_reaches_the_decoder_as_it_came(bench: Make) -> None:
    d = decoder()
    router = await bench(prefiller(), d)
    raw = b'{"model":"m" , "prompt":[1,2], "temperature":0.70, "logit_bias":{"5":1e1}, "vllm_xargs":{"mine":[1]}}'
    await router.client.post("/v1/completions", raw)
    assert d.seen[0].raw.startswith(raw[:-1] + b',"kv_transfer_params":')


async def test_content_as_a_list_of_parts_is_served(bench: Make) -> None:
    router = await bench(prefiller(), decoder())
    parts: list[dict[str, Any]] = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    assert (await router.client.chat("s", messages=[{"role": "user", "content": parts}])).status == 200


async def test_every_attempt_of_a_request_carries_its_session(bench: Make) -> None:
    prefillers, decoders = [prefiller(0), prefiller(1)], [decoder(0), decoder(1)]
    router = await bench(*prefillers, *decoders)
    await router.client.chat("s")
    for engine in decoders:
        engine.holds = False
    prefillers[0].script = [Answer.error(500)]
    prefillers[1].script = [Answer.error(500)]
    await router.client.chat("s")
    everything = [seen for engine in (*prefillers, *decoders) for seen in engine.seen]
    assert len(everything) >= 5 and {seen.headers["x-session-id"] for seen in everything} == {"s"}


async def test_concurrent_turns_of_one_session_are_all_served_by_its_owner(bench: Make) -> None:
    p, decoders = prefiller(), [decoder(0), decoder(1)]
    router = await bench(p, *decoders)
    first = await router.client.chat("s")
    turns = await asyncio.gather(*[router.client.chat("s", stream=bool(n % 2)) for n in range(8)])
    assert {(turn.status, turn.decision) for turn in turns} == {(200, "append")}
    assert {turn.headers["x-schedloom-decoder"] for turn in turns} == {first.headers["x-schedloom-decoder"]}


async def test_the_last_of_concurrent_first_turns_to_succeed_is_the_owner(bench: Make) -> None:
    p, decoders = prefiller(), [decoder(0), decoder(1)]
    router = await bench(p, *decoders)
    both_are_here = asyncio.Event()

    async def wait(seen: Any) -> Answer:
        if len(p.seen) == 2:
            both_are_here.set()
        await both_are_here.wait()
        return p._ordinary(seen)

    p.script = [wait, wait]
    turns = await asyncio.gather(*[router.client.chat("s") for _ in range(2)])
    assert {turn.decision for turn in turns} == {"pd"}
    assert {turn.headers["x-schedloom-decoder"] for turn in turns} == {"engine-1", "engine-2"}
    assert (await router.client.chat("s")).decision == "append"


async def test_an_owner_that_goes_during_a_local_attempt_is_followed_by_one_fallback(bench: Make) -> None:
    p, decoders = prefiller(), [decoder(0), decoder(1)]
    router = await bench(p, *decoders)
    await router.client.chat("s")
    owner = next(engine for engine in decoders if engine.seen)
    gate = asyncio.Event()

    async def die(seen: Any) -> Answer:
        await gate.wait()
        return Answer(200, EVENTS, [BROKEN])

    owner.script = [die]
    request = asyncio.create_task(router.client.chat("s", stream=True))
    await asyncio.sleep(0)
    owner.reachable = False
    await router.app.membership.look_at_all()
    gate.set()
    received = await request
    assert (received.status, received.decision, received.text) == (200, "fallback", " word word word")
    assert len(p.seen) == 2


async def test_models_are_those_of_the_healthy_engines(bench: Make) -> None:
    decoders = [decoder(0), decoder(1)]
    router = await bench(prefiller(), *decoders)
    decoders[0].reachable = False
    await router.app.membership.look_at_all()
    received = await router.client.get("/v1/models")
    assert (received.status, [model["id"] for model in received.json["data"]]) == (200, ["fake-model"])


async def test_one_hung_engine_blocks_nobody_else(bench: Make) -> None:
    p, decoders = prefiller(), [decoder(0), decoder(1)]
    router = await bench(p, *decoders)
    never = asyncio.Event()
    decoders[0].always = Answer(200, EVENTS, [event_bytes(WORD), never])
    hung = [asyncio.create_task(router.client.chat(stream=True)) for _ in range(4)]
    await until(lambda: decoders[0].open and decoders[0].open + sum(one.done() for one in hung) == 4)
    served = [await asyncio.wait_for(router.client.chat(), PATIENCE_SECONDS) for _ in range(20)]
    assert {turn.status for turn in served} == {200}
    assert {turn.headers["x-schedloom-decoder"] for turn in served} == {"engine-2"}
    router.client.leave.set()
    await asyncio.gather(*hung)


async def test_series_do_not_grow_with_sessions(bench: Make) -> None:
    router = await bench(prefiller(), decoder())
    sizes = []
    for block in range(2):
        for number in range(300):
            await router.client.chat(f"{block}-{number}", model=f"m{number}")
        sizes.append(len((await router.client.get("/metrics")).body.splitlines()))
    assert sizes[0] == sizes[1]
