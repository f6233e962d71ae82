"""B3, R2, SEC-1: what two engines are told when KV travels between them, by every way alike. The engines are fakes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from schedloom.router.http.upstream import ConnectFailed
from tests.router.conftest import Bench, Make
from tests.router.fakes import BROKEN, EVENTS, MODEL, Answer, FakeEngine, Seen, decoder, prefiller, transfer_parameters
from tests.router.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio

PUSH: dict[str, Any] = {"kv_connectors": ["NixlPushConnector"]}
ENDPOINTS = [
    {"engine_id": "engine_dp0", "host": "10.0.0.7", "port": 5600, "tp_size": 2},
    {"engine_id": "engine_dp1", "host": "10.0.0.7", "port": 5601, "tp_size": 2},
]
LATE_ERROR = {"error": {"message": "late", "code": 500}}

MOONCAKE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "p0",
    "remote_request_id": "chatcmpl-x",
    "remote_host": "10.0.0.7",
    "remote_port": 30000,
    "remote_pcp_size": 1,
    "remote_dcp_size": 1,
    "remote_ptp_size": 4,
    "last_token_id": 7,
    "remote_multi_nodes_meta_mapping": {},
    "num_prompt_blocks": 3,
    "remote_block_size": [16],
}
"""As vllm-ascend 0.30.0rc2 has them in ``MooncakeConnector.request_finished``."""


class WritingPair:
    """A fake Decoder that waits until its fake Prefiller is done."""

    def __init__(self, ranks: int = 1) -> None:
        self.p = prefiller(kv_endpoints=ENDPOINTS[:ranks], data_parallel_size=ranks, **PUSH)
        self.d = decoder(features=[], **PUSH)
        self.written = asyncio.Event()
        self.d.script = [self.decode] * 9
        self.p.script = [self.prefill] * 9

    async def bench(self, make: Make, *more: FakeEngine, **settings: Any) -> Bench:
        return await make(self.p, self.d, *more, append=False, **settings)

    async def prefill(self, seen: Seen) -> Answer:
        assert seen.body["stream"] is True
        self.written.set()
        return Answer.stream(*self.p._chunks(seen)[-2:])

    async def decode(self, seen: Seen) -> Answer:
        await self.written.wait()
        return self.d._ordinary(seen)


@pytest.mark.parametrize("stream", [False, True])
async def test_both_know_each_other_by_one_request_id(bench: Make, stream: bool) -> None:
    pair = WritingPair()
    router = await pair.bench(bench)
    received = await router.client.chat("s", stream=stream)
    assert (received.status, received.decision, received.text) == (200, "pd", " word word word")
    (to_p,), (to_d,) = pair.p.seen, pair.d.seen
    assert to_p.headers["x-request-id"] == to_d.headers["x-request-id"]
    assert to_p.body["kv_transfer_params"]["do_remote_decode"] is True
    assert to_d.body["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine_dp0",
        "remote_request_id": to_d.headers["x-request-id"],
        "remote_host": "10.0.0.7",
        "remote_port": 5600,
        "tp_size": 2,
        "pp_size": 1,
    }


async def test_the_decoder_registers_at_the_rank_that_prefills(bench: Make) -> None:
    pair = WritingPair(ranks=2)
    router = await pair.bench(bench)
    for _ in range(4):
        await router.client.chat()
    ranks = [int(seen.headers["x-data-parallel-rank"]) for seen in pair.p.seen]
    told = [seen.body["kv_transfer_params"]["remote_port"] for seen in pair.d.seen]
    assert sorted(ranks) == [0, 0, 1, 1] and told == [5600 + rank for rank in ranks]


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_a_prefiller_that_does_not_accept_keeps_the_decoder_out_of_it(bench: Make, status: int) -> None:
    pair = WritingPair()
    router = await pair.bench(bench)
    pair.p.script = [Answer.error(status, "prefiller says no")]
    received = await router.client.chat()
    assert (received.status, received.json["error"]["message"]) == (status, "prefiller says no")
    assert pair.d.seen == []


@pytest.mark.parametrize("status", [400, 429, 503])
async def test_a_decoder_that_refuses_stops_the_prefill(bench: Make, status: int) -> None:
    pair = WritingPair()
    router = await pair.bench(bench)
    pair.p.script = [Answer(200, b"text/event-stream", [asyncio.Event()])]
    pair.d.script = [Answer.error(status, "decoder says no")]
    received = await router.client.chat()
    assert (received.status, received.json["error"]["message"]) == (status, "decoder says no")
    await asyncio.sleep(0)
    assert pair.p.cancelled == 1


async def test_what_was_computed_for_a_decoder_that_refused_is_taken_over(bench: Make) -> None:
    pair = WritingPair()
    router = await pair.bench(bench)
    taken = asyncio.Event()

    async def refuse(seen: Seen) -> Answer:
        await pair.written.wait()
        await asyncio.sleep(0.01)
        return Answer.error(400, "no")

    async def take_over(seen: Seen) -> Answer:
        taken.set()
        return Answer.of({})

    pair.d.script = [refuse, take_over]
    assert (await router.client.chat(max_tokens=100_000)).status == 400
    await asyncio.wait_for(taken.wait(), PATIENCE_SECONDS)
    refused, took = pair.d.seen
    assert took.headers["x-request-id"] == refused.headers["x-request-id"] == pair.p.seen[0].headers["x-request-id"]
    assert took.body["kv_transfer_params"] == refused.body["kv_transfer_params"]
    assert (took.body["max_tokens"], took.body["stream"]) == (1, False)


async def test_a_prefill_that_fails_late_is_repeated_where_the_decoder_waits(bench: Make) -> None:
    pair = WritingPair()
    router = await pair.bench(bench, prefiller(1, kv_endpoints=ENDPOINTS[1:], **PUSH))
    pair.p.script.insert(0, Answer.stream(LATE_ERROR, "[DONE]"))
    received = await router.client.chat()
    assert received.status == 200
    first, second = pair.p.seen
    assert first.headers["x-request-id"] == second.headers["x-request-id"]
    assert len(pair.d.seen) == 1


async def test_a_prefill_that_fails_twice_stops_the_decoder(bench: Make) -> None:
    pair = WritingPair()
    router = await pair.bench(bench, decoder(1, features=[], **PUSH))
    pair.p.script = [Answer.stream(LATE_ERROR, "[DONE]")] * 2
    received = await router.client.chat()
    assert (received.status, received.json["error"]["code"]) == (502, "prefill_failed")
    assert (len(pair.p.seen), len(pair.d.seen), pair.d.cancelled) == (2, 1, 1)


async def test_a_client_does_not_wait_for_a_prefiller_that_hangs_but_its_decoder_does(bench: Make) -> None:
    pair, goes_on = WritingPair(), asyncio.Event()
    router = await pair.bench(bench, other := prefiller(1, kv_endpoints=ENDPOINTS[1:], **PUSH))
    pair.p.script.insert(0, Answer(200, EVENTS, [goes_on, *Answer.stream("[DONE]").steps]))
    sent = router.watched()
    request = asyncio.create_task(router.client.chat())
    while not pair.d.seen:
        await asyncio.sleep(0)
    (to_p,) = [one for one in sent if one.origin == pair.p.origin]
    assert to_p.waits(has_begun=True) and not to_p.give_up() and not to_p.waits(has_begun=False)
    while not other.seen:
        await asyncio.sleep(0)
    pair.written.set()
    received = await request
    assert (received.status, len(other.seen), len(pair.d.seen)) == (200, 1, 2)
    assert (pair.d.cancelled, pair.p.cancelled, pair.p.open) == (1, 0, 1)
    goes_on.set()
    while pair.p.open:
        await asyncio.sleep(0)
    assert pair.p.cancelled == 0


@pytest.mark.parametrize(("path", "marked"), [("/v1/chat/completions", False), ("/v1/completions", True)])
async def test_what_a_prefill_could_not_be_found_for_is_not_handed_back(bench: Make, path: str, marked: bool) -> None:
    """A continuation is prefilled as a completion, and its id would not be that of a chat."""
    pair = WritingPair()
    pair.d = decoder(features=["recompute"], **PUSH)
    router = await pair.bench(bench)
    body = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    received = await router.client.post(path, {"model": "fake-model", **body})
    assert received.status == 200
    assert ("schedloom_continuable" in (pair.d.seen[0].body.get("vllm_xargs") or {})) is marked


async def test_a_client_that_leaves_while_the_decoder_waits_stops_no_prefill(bench: Make) -> None:
    pair = WritingPair()
    router = await pair.bench(bench)
    go = asyncio.Event()

    async def leave(seen: Seen) -> Answer:
        router.client.leave.set()
        await asyncio.Event().wait()
        raise AssertionError

    pair.p.script = [Answer(200, b"text/event-stream", [go, b"data: [DONE]\n\n"])]
    pair.d.script = [leave]
    await router.client.chat()
    await asyncio.sleep(0)
    assert (pair.p.cancelled, pair.p.open) == (0, 1)
    go.set()
    await until(lambda: pair.p.open == 0)
    assert pair.p.cancelled == 0


NIXL: dict[str, Any] = {"kv_connectors": ["NixlConnector"]}


def declines(*decoders: FakeEngine) -> list[tuple[str, Any]]:
    """The ids of requests whose KV Decoders told the Prefiller not to keep, and where that is said to be."""
    seen = [one for engine in decoders for one in engine.seen if one.body["model"] != MODEL]
    assert all((one.path, one.body["prompt"]) == ("/v1/completions", [0]) for one in seen)
    return [(one.headers["x-request-id"], one.body["kv_transfer_params"]) for one in seen]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 404, 422, 503])
async def test_kv_that_a_decoder_does_not_pull_is_declined(bench: Make, status: int, stream: bool) -> None:
    p, d = prefiller(**NIXL), decoder(**NIXL)
    router = await bench(p, d, append=False)
    d.script = [Answer.error(status)]
    assert (await router.client.chat(stream=stream)).status == status
    await until(lambda: declines(d))
    assert declines(d) == [(p.seen[0].headers["x-request-id"], transfer_parameters())]
    assert (await router.client.chat()).status == 200
    await asyncio.sleep(0.01)
    assert len(declines(d)) == 1


async def test_kv_that_a_lost_decoder_does_not_pull_is_declined_by_another(bench: Make) -> None:
    p, lost, other = prefiller(**NIXL), decoder(0, **NIXL), decoder(1, **NIXL)
    router = await bench(p, lost, other, append=False)
    lost.always = Answer(200, b"application/json", [ConnectFailed("refused")])
    assert (await router.client.chat()).status == 200
    await until(lambda: declines(other))
    assert declines(other) == [(p.seen[0].headers["x-request-id"], transfer_parameters())]


@pytest.mark.parametrize("answer", [Answer.error(500), Answer(200, b"application/json", [BROKEN])])
async def test_kv_that_may_be_pulled_is_not_declined(bench: Make, answer: Answer) -> None:
    p, d = prefiller(**NIXL), decoder(**NIXL)
    router = await bench(p, d, append=False)
    d.script = [answer]
    assert (await router.client.chat()).status >= 500
    await asyncio.sleep(0.01)
    assert declines(d) == [] and len(d.seen) == 1


async def test_nothing_is_declined_by_an_unknown_connector(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d, append=False)
    d.script = [Answer.error(400)]
    assert (await router.client.chat()).status == 400
    await asyncio.sleep(0.01)
    assert len(d.seen) == 1


async def test_mooncake_parameters_travel_as_they_came(bench: Make) -> None:
    named: dict[str, Any] = {"kv_connectors": ["MooncakeConnectorV1"]}
    p, d = prefiller(**named), decoder(**named)
    router = await bench(p, d)
    p.script = [Answer.of({"choices": [], "kv_transfer_params": MOONCAKE})]
    received = await router.client.chat()
    assert (received.status, received.decision) == (200, "pd")
    assert d.seen[0].body["kv_transfer_params"] == MOONCAKE
    told = p.seen[0].body
    assert (told["kv_transfer_params"]["do_remote_decode"], told["ignore_eos"], told["max_tokens"]) == (True, True, 1)


OUTPUT: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 50,
    "max_completion_tokens": 60,
    "min_tokens": 5,
    "thinking_token_budget": 9,
    "n": 1,
    "stop": ["x"],
    "logprobs": True,
    "top_logprobs": 3,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "return_token_ids": True,
}


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_the_prefillers_copy_asks_for_the_prompt_and_nothing_else(bench: Make, mode: str) -> None:
    pair = WritingPair()
    p, d = (pair.p, pair.d) if mode == "push" else (prefiller(), decoder())
    router = await bench(p, d, append=False)
    await router.client.chat(**OUTPUT, tools=[{"type": "function", "function": {"name": "f"}}], seed=3)
    (to_p,), (to_d,) = p.seen, d.seen
    assert set(to_p.body) == {
        *("model", "messages", "tools", "seed"),
        *("stream", "max_tokens", "max_completion_tokens", "n", "ignore_eos", "kv_transfer_params"),
    }
    assert (to_p.body["max_tokens"], to_p.body["max_completion_tokens"], to_p.body["n"]) == (1, 1, 1)
    assert {key: to_d.body[key] for key in OUTPUT} == OUTPUT
