"""B3, SEC-1, SEC-2: Decoders that ask the router for their prefills.

The engines are fakes. What they say to the router, and under which names, is what vllm-ascend 0.30.0rc2 has in
``MooncakeLayerwiseConnector``; nothing here ran on an NPU.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from schedloom.core.wire import Role
from schedloom.router.http.upstream import TimedOut
from tests.router.conftest import Bench, Make
from tests.router.fakes import Answer, FakeEngine, Seen, contract
from tests.router.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio

CONNECTOR: dict[str, Any] = {"kv_connectors": ["MooncakeLayerwiseConnector"], "features": []}
ROUTER = "http://10.0.0.9:9000"
ASKED = {
    "token_ids": [],
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [[4, 5, 6]],
    "remote_block_size": [16],
    "remote_engine_id": "d0",
    "remote_host": "10.0.0.8",
    "remote_port": 5557,
    "remote_tp_size": 1,
    "remote_pcp_size": 1,
    "remote_dcp_size": 1,
    "remote_cached_tokens": 0,
}


class LayerwisePair:
    """A fake Decoder that waits until its fake Prefiller has written, and the router between them."""

    def __init__(self) -> None:
        self.p = FakeEngine("http://p:1", contract(Role.PRODUCER, **CONNECTOR))
        self.d = FakeEngine("http://d:1", contract(Role.CONSUMER, **CONNECTOR))
        self.written = asyncio.Event()
        self.callbacks: list[Any] = []
        self.addresses: list[str] = []
        self.p.script = [self.prefill] * 9
        self.d.script = [self.decode] * 9

    async def bench(self, make: Make, *more: FakeEngine, **settings: Any) -> Bench:
        self.router = await make(self.p, self.d, *more, append=False, callback_url=ROUTER, **settings)
        return self.router

    async def prefill(self, seen: Seen) -> Answer:
        self.written.set()
        return Answer.of(self.p._whole(seen, 1))

    async def decode(self, seen: Seen) -> Answer:
        await self.ask(seen)
        await self.written.wait()
        return Answer.of(self.d._whole(seen, 3))

    async def ask(self, seen: Seen, **changes: Any) -> int:
        address = seen.body["kv_transfer_params"]["metaserver"]
        self.addresses.append(address)
        body = ASKED | {"request_id": f"chatcmpl-{seen.headers['x-request-id']}"} | changes
        answer = await self.router.client.post(address.removeprefix(ROUTER), body)
        self.callbacks.append(answer)
        return answer.status


async def test_the_decoder_goes_first_and_asks_for_the_prefill(bench: Make) -> None:
    pair = LayerwisePair()
    router = await pair.bench(bench)
    received = await router.client.chat("s", stream_options={"include_usage": True}, stream=False)
    assert (received.status, received.decision, received.text) == (200, "pd", " word word word")
    (to_d,), (to_p,) = pair.d.seen, pair.p.seen
    told = to_d.body["kv_transfer_params"]
    assert {key: told[key] for key in told if key != "metaserver"} == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
    }
    assert told["metaserver"].startswith(f"{ROUTER}/v1/metaserver?")
    asked = to_p.body["kv_transfer_params"]
    assert {key: asked[key] for key in ASKED} == ASKED
    assert (to_p.body["max_tokens"], to_p.body["stream"], to_p.body["n"]) == (1, False, 1)
    assert "stream_options" not in to_p.body
    assert to_p.headers["x-request-id"] == to_d.headers["x-request-id"]
    assert pair.callbacks[0].json == {"status": "ok"}


async def test_a_callback_is_accepted_once_and_at_its_own_address_only(bench: Make) -> None:
    pair = LayerwisePair()
    router = await pair.bench(bench)

    async def twice(seen: Seen) -> Answer:
        body = ASKED | {"request_id": f"chatcmpl-{seen.headers['x-request-id']}"}
        for guess in ("/v1/metaserver", "/v1/metaserver?", f"/v1/metaserver?{'a' * 32}"):
            assert (await router.client.post(guess, body)).json["error"]["code"] == "unknown_callback"
        assert await pair.ask(seen) == 200
        assert await pair.ask(seen) == 404
        await pair.written.wait()
        return Answer.of(pair.d._whole(seen, 3))

    pair.d.script = [twice]
    assert (await router.client.chat()).status == 200
    assert len(pair.p.seen) == 1


@pytest.mark.parametrize(
    "changes", [{"request_id": "chatcmpl-another"}, {"request_id": None}, {"do_remote_decode": False}]
)
async def test_a_callback_about_something_else_is_refused(bench: Make, changes: dict[str, Any]) -> None:
    pair = LayerwisePair()
    router = await pair.bench(bench)

    async def odd(seen: Seen) -> Answer:
        assert await pair.ask(seen, **changes) == 400
        assert await pair.ask(seen) == 200
        await pair.written.wait()
        return Answer.of(pair.d._whole(seen, 3))

    pair.d.script = [odd]
    assert (await router.client.chat()).status == 200
    assert len(pair.p.seen) == 1


@pytest.mark.parametrize("raw", [b"no json", b"[]", b"{"])
async def test_a_callback_that_cannot_be_read_is_refused(bench: Make, raw: bytes) -> None:
    pair = LayerwisePair()
    router = await pair.bench(bench)

    async def odd(seen: Seen) -> Answer:
        path = seen.body["kv_transfer_params"]["metaserver"].removeprefix(ROUTER)
        assert (await router.client.post(path, raw)).status == 400
        assert (await router.client.post(path, b"x" * (2**20 + 1))).status == 413
        return await pair.decode(seen)

    pair.d.script = [odd]
    assert (await router.client.chat()).status == 200


async def test_addresses_are_unguessable_and_never_the_same(bench: Make) -> None:
    pair = LayerwisePair()
    router = await pair.bench(bench)
    for _ in range(4):
        assert (await router.client.chat()).status == 200
    tokens = {address.partition("?")[2] for address in pair.addresses}
    assert len(tokens) == 4 and all(len(token) >= 32 for token in tokens)


async def test_a_prefill_that_fails_is_made_once_more(bench: Make) -> None:
    pair = LayerwisePair()
    router = await pair.bench(bench)
    pair.p.script.insert(0, Answer.error(500))
    assert (await router.client.chat()).status == 200
    assert (len(pair.p.seen), len(pair.d.seen)) == (2, 1)


@pytest.mark.parametrize("others", [0, 1])
async def test_another_prefiller_writes_where_one_hangs(bench: Make, others: int) -> None:
    pair, ends = LayerwisePair(), asyncio.Event()
    more = [FakeEngine(f"http://q{number}:1", contract(Role.PRODUCER, **CONNECTOR)) for number in range(others)]

    async def hang(seen: Seen) -> Answer:
        await ends.wait()
        return Answer(200, b"application/json", [TimedOut("hangs")] if others else [b"{}"])

    async def write(seen: Seen) -> Answer:
        return await pair.prefill(seen)

    router = await pair.bench(bench, *more)
    pair.p.script.insert(0, hang)
    for engine in more:
        engine.script = [write]
    sent = router.watched()
    request = asyncio.create_task(router.client.chat())
    while not pair.p.seen:
        await asyncio.sleep(0)
    (to_p,) = [one for one in sent if one.origin == pair.p.origin]
    assert to_p.waits(has_begun=True) and to_p.give_up() is bool(others)
    if others:
        ends.set()
    received = await request
    assert received.status == (200 if others else 504)
    assert (len(pair.d.seen), pair.d.cancelled, pair.p.cancelled) == (1, 1 - others, 0)
    ends.set()
    while router.in_flight != [0] * len(router.in_flight):
        await asyncio.sleep(0)


async def test_when_the_prefill_fails_for_good_the_decoder_is_told_to_stop(bench: Make) -> None:
    pair = LayerwisePair()
    router = await pair.bench(bench)
    pair.p.script = [Answer.error(500, "no prefill")] * 9
    received = await router.client.chat()
    assert (received.status, received.json["error"]["message"]) == (500, "no prefill")
    assert (len(pair.p.seen), len(pair.d.seen), pair.d.cancelled) == (2, 1, 1)


async def test_a_prefillers_refusal_is_the_clients_to_know(bench: Make) -> None:
    pair = LayerwisePair()
    router = await pair.bench(bench)
    pair.p.script = [Answer.error(400, "too long")]
    assert (await router.client.chat()).status == 400
    assert (len(pair.p.seen), pair.d.cancelled) == (1, 1)


async def test_a_decoder_that_refuses_causes_no_prefill(bench: Make) -> None:
    pair = LayerwisePair()
    router = await pair.bench(bench)
    pair.d.script = [Answer.error(400, "no")]
    assert (await router.client.chat()).status == 400
    assert pair.p.seen == []


async def test_a_decoder_that_needs_no_prefill_asks_for_none(bench: Make) -> None:
    pair = LayerwisePair()
    router = await pair.bench(bench)
    pair.d.script = []
    assert (await router.client.chat()).status == 200
    assert pair.p.seen == []


async def test_a_client_that_leaves_does_not_leave_the_decoder_waiting(bench: Make) -> None:
    """What the Decoder has asked for is computed, even when it asks just after its client has left."""
    pair = LayerwisePair()
    router = await pair.bench(bench)

    asked: list[asyncio.Future[int]] = []

    async def late(seen: Seen) -> Answer:
        router.client.leave.set()
        try:
            await asyncio.Event().wait()
        finally:
            asked.append(asyncio.ensure_future(pair.ask(seen)))
        raise AssertionError

    pair.d.script = [late]
    await router.client.chat()
    router.client.leave.clear()
    await asyncio.wait_for(pair.written.wait(), PATIENCE_SECONDS)
    assert await asked[0] == 200


async def test_callbacks_that_never_come_are_forgotten(bench: Make) -> None:
    pair = LayerwisePair()
    router = await pair.bench(bench, handoff_timeout_seconds=0.05)
    pair.d.script = []
    for _ in range(5):
        await router.client.chat()
    await until(lambda: len(router.app._attempts.callbacks) == 0)


async def test_a_callback_is_no_endpoint_for_anything_else(bench: Make) -> None:
    pair = LayerwisePair()
    router = await pair.bench(bench)
    assert (await router.client.get("/v1/metaserver")).status == 405
    answer = await router.client.post("/v1/metaserver?x", json.dumps(ASKED).encode())
    assert (answer.status, answer.json["error"]["code"]) == (404, "unknown_callback")
