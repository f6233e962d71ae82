"""X5: what is known from KV events: blocks by content and by session, over real sockets, with gaps and restarts.

The events have the form that a real engine was seen to publish; tests/engines/test_kv_events.py holds it to one.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from schedloom.core.errors import ConfigurationError
from schedloom.core.routing import Held
from schedloom.core.wire import Role
from schedloom.router.events import ledger as ledgers
from schedloom.router.events.ledger import BlockLedger, Prompt
from schedloom.router.events.listener import Events
from schedloom.router.fleet.fleet import Fleet
from schedloom.router.fleet.worker import Worker
from schedloom.router.settings import WorkerSettings
from tests.router.conftest import Make
from tests.router.fakes import MODEL, Answer, contract, decoder, prefiller
from tests.router.waiting import PATIENCE_SECONDS

SIZE = 4
Event = dict[str, Any]


def stored(
    names: Sequence[int], tokens: Sequence[int], parent: int | None = None, salt: str | None = None, **more: Any
) -> Event:
    extras = [[salt] if salt and number == 0 and parent is None else None for number in range(len(names))]
    event: Event = {"type": "BlockStored", "block_hashes": list(names), "parent_block_hash": parent}
    event |= {"token_ids": list(tokens), "block_size": SIZE, "medium": "GPU", "extra_keys": extras}
    return event | {"group_idx": 0, "kv_cache_spec_kind": "full_attention"} | more


def removed(*names: int, medium: str = "GPU") -> Event:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": medium, "group_idx": 0}


CLEARED: Event = {"type": "AllBlocksCleared"}
PROMPT = list(range(100, 112))


def whole(*events: Event) -> BlockLedger:
    ledger = BlockLedger()
    ledger.is_whole = True
    ledger.apply(events)
    return ledger


def test_a_prompt_is_held_as_far_as_its_blocks_are() -> None:
    ledger = whole(stored([1, 2, 3], PROMPT))
    assert ledger.of_prompt(Prompt([*PROMPT, 5, 6])) == Held(12, True)
    assert ledger.of_prompt(Prompt([*PROMPT[:8], 0, 0, 0, 0])) == Held(8, True)
    assert ledger.of_prompt(Prompt(PROMPT[:7])) == Held(4, True)
    assert ledger.of_prompt(Prompt([0, *PROMPT])) == Held(0, True)
    ledger.apply([removed(2)])
    assert ledger.of_prompt(Prompt(PROMPT)) == Held(4, True)


def test_no_other_tokens_stand_for_those_that_are_held() -> None:
    """SEC-14: numbers that Python's own hash takes for the same are others."""
    ledger, same = whole(stored([1, 2, 3], PROMPT)), 2**61 - 1
    assert [hash(token + same) for token in PROMPT] == PROMPT
    assert ledger.of_prompt(Prompt([token + same for token in PROMPT])) == Held(0, True)
    assert whole(stored([1], [-1] * 4)).of_prompt(Prompt([-2] * 4)) == Held(0, True)


@pytest.mark.anyio
async def test_a_prompt_is_worked_out_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    events, worked_out = Events(Fleet([])), []

    def content(*parts: Any) -> bytes:
        worked_out.append(parts)
        return ledgers._NOTHING

    monkeypatch.setattr(ledgers, "_content", content)
    for tokens, salt, count in (
        (PROMPT, "salt", 3),
        (PROMPT, "salt", 3),
        (PROMPT, "other", 6),
        ([*PROMPT], "other", 9),
    ):
        assert len(list(events._known(tokens, salt).contents(SIZE))) == 3 and len(worked_out) == count
    await events.close()


def test_blocks_are_told_apart_by_their_salt_and_what_they_go_on_from() -> None:
    ledger = whole(stored([1], PROMPT[:4], salt="tenant"), stored([2], PROMPT[4:8], parent=1))
    assert ledger.of_prompt(Prompt(PROMPT, "tenant")) == Held(8, True)
    assert ledger.of_prompt(Prompt(PROMPT)) == ledger.of_prompt(Prompt(PROMPT, "other")) == Held(0, True)
    assert ledger.of_prompt(Prompt(PROMPT[4:8])) == Held(0, True)


def test_a_session_is_held_to_its_first_gap() -> None:
    ledger = whole(stored([1, 2], PROMPT[:8], session_id="first"), stored([3], PROMPT[8:], parent=2, session_id="s"))
    assert ledger.of_session("s") == Held(12, True)
    ledger.apply([removed(3)])
    assert ledger.of_session("s") == Held(8, True)
    ledger.apply([removed(1)])
    assert ledger.of_session("s") == ledger.of_session("first") == Held(0, True)
    ledger.apply([stored([1], PROMPT[:4])])
    assert ledger.of_session("s") == Held(8, True)
    assert ledger.of_session("unknown") == Held(0, True)


def test_a_block_in_two_places_is_gone_when_it_left_both() -> None:
    ledger = whole(stored([1], PROMPT[:4]), stored([1], PROMPT[:4], medium="CPU"), removed(1))
    assert ledger.of_prompt(Prompt(PROMPT)) == Held(4, True)
    ledger.apply([removed(1, medium="CPU")])
    assert ledger.of_prompt(Prompt(PROMPT)) == Held(0, True)


def test_other_kinds_of_cache_are_not_followed() -> None:
    assert len(whole(stored([1], PROMPT[:4], kv_cache_spec_kind="sliding_window"))) == 0


def test_what_began_before_is_not_known() -> None:
    ledger = BlockLedger()
    assert ledger.of_prompt(Prompt(PROMPT)) is None and ledger.of_session("s") is None
    ledger.apply([stored([7], PROMPT[:4], parent=6, session_id="s"), stored([1], PROMPT[:4], session_id="new")])
    assert ledger.of_session("s") is None
    assert ledger.of_session("new") == Held(4, True)
    assert ledger.of_prompt(Prompt(PROMPT)) == Held(4, False)
    ledger.apply([CLEARED])
    assert ledger.of_session("s") == ledger.of_prompt(Prompt(PROMPT)) == Held(0, True)


def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "MAX_SESSIONS", 2)
    ledger = BlockLedger()
    for number in range(5):
        ledger.apply([stored([number], [number] * 4, session_id=str(number)), removed(number)])
    assert len(ledger._leaves) == len(ledger._known) == 2


@pytest.mark.parametrize("seed", range(30))
def test_a_ledger_says_what_a_cache_would(seed: int) -> None:
    """Against a cache that is nothing but a set of prefixes."""
    chance, ledger = random.Random(seed), whole()
    cache: set[tuple[int, ...]] = set()
    names: dict[tuple[int, ...], int] = {}
    for _ in range(200):
        prompt = tuple(chance.choices(range(2), k=SIZE * chance.randint(1, 5)))
        blocks = [prompt[:end] for end in range(SIZE, len(prompt) + 1, SIZE)]
        if chance.random() < 0.4 and cache:
            gone = chance.choice(sorted(cache))
            cache.discard(gone)
            ledger.apply([removed(names[gone])])
        held = next((number for number, block in enumerate(blocks) if block not in cache), len(blocks))
        assert ledger.of_prompt(Prompt(prompt)) == Held(held * SIZE, True)
        for block in blocks[held:]:
            names.setdefault(block, len(names))
            parent = names[block[:-SIZE]] if block[:-SIZE] else None
            ledger.apply([stored([names[block]], block[-SIZE:], parent)])
            cache.add(block)
    assert len(ledger) == len(cache)


class Publisher:
    """An engine's publisher, fake but for its sockets: what is published, and again on demand what was."""

    def __init__(self, context: Any, *, replays: bool) -> None:
        self.socket = context.socket(zmq.PUB)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.replay = context.socket(zmq.ROUTER) if replays else None
        self.replay_port = self.replay.bind_to_random_port("tcp://127.0.0.1") if self.replay else None
        self.sent: list[bytes] = []
        self.forgotten = 0

    async def publish(self, *events: Event, lost: bool = False) -> None:
        payload = msgspec.msgpack.encode([0.0, list(events), 0])
        self.sent.append(payload)
        if not lost:
            await self.socket.send_multipart([b"kv", self._number(len(self.sent) - 1), payload])

    async def answer(self) -> None:
        assert self.replay is not None
        while True:
            client, _, start = await self.replay.recv_multipart()
            for number in range(max(int.from_bytes(start, "big"), self.forgotten), len(self.sent)):
                await self.replay.send_multipart([client, b"", b"kv", self._number(number), self.sent[number]])
            await self.replay.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    @staticmethod
    def _number(number: int) -> bytes:
        return number.to_bytes(8, "big")


class Place:
    """One Decoder whose publisher a listener follows."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.worker = Worker("decoder-0", WorkerSettings(url="http://127.0.0.1:1"))
        self.join("e1")
        self.events = Events(Fleet([self.worker]))
        self.events.start()

    def join(self, epoch: str) -> None:
        ports = {"kv_events_port": self.publisher.port, "kv_replay_port": self.publisher.replay_port}
        self.worker.join(contract(Role.CONSUMER, epoch=epoch, **ports))

    @property
    def held(self) -> Held | None:
        return self.events.of_prompt(self.worker.targets[0], PROMPT, None)

    async def comes_to(self, held: Held | None, nudge: Callable[[], Any] | None = None) -> None:
        for _ in range(1200):
            if self.held == held:
                return
            if nudge is not None:
                await nudge()
            await asyncio.sleep(0.05)
        raise AssertionError(f"{self.held} and not {held}")


Follow = Callable[..., Any]


@pytest.fixture
async def follow() -> AsyncIterator[Follow]:
    context = zmq.asyncio.Context()
    tasks: list[asyncio.Task[None]] = []
    places: list[Place] = []

    async def made(*before: Event, replays: bool = True, forgotten: int = 0) -> Place:
        publisher = Publisher(context, replays=replays)
        if replays:
            tasks.append(asyncio.create_task(publisher.answer()))
        for event in before:
            await publisher.publish(event)
        publisher.forgotten = forgotten
        places.append(Place(publisher))
        return places[-1]

    yield made
    for place in places:
        await place.events.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    context.destroy(linger=0)


@pytest.mark.anyio
async def test_a_router_that_comes_later_is_told_again(follow: Follow) -> None:
    place = await follow(stored([1], PROMPT[:4]), stored([2], PROMPT[4:8], parent=1))
    await place.comes_to(Held(8, True))


@pytest.mark.anyio
async def test_an_engine_that_has_nothing_to_tell_holds_nothing(follow: Follow) -> None:
    place = await follow()
    await place.comes_to(Held(0, True))
    await place.publisher.publish(stored([1], PROMPT[:4]))
    await place.comes_to(Held(4, True))


@pytest.mark.anyio
async def test_what_was_lost_is_told_again(follow: Follow) -> None:
    place = await follow(stored([1], PROMPT[:4]))
    await place.comes_to(Held(4, True))
    await place.publisher.publish(stored([2], PROMPT[4:8], parent=1), lost=True)
    await place.publisher.publish(stored([3], PROMPT[8:], parent=2))
    await place.comes_to(Held(12, True))


@pytest.mark.anyio
@pytest.mark.parametrize("replays", [True, False])
async def test_what_is_lost_for_good_leaves_nothing_known(follow: Follow, replays: bool) -> None:
    place = await follow(replays=replays)
    await place.comes_to(Held(4, replays), lambda: place.publisher.publish(stored([1], PROMPT[:4])))
    place.publisher.forgotten = len(place.publisher.sent) + 1
    await place.publisher.publish(removed(1), lost=True)
    await place.publisher.publish(stored([9], [0] * 4))
    await place.comes_to(Held(0, False))


@pytest.mark.anyio
async def test_without_replay_a_late_router_is_sure_of_nothing(follow: Follow) -> None:
    place = await follow(stored([1], PROMPT[:4]), replays=False)
    await place.comes_to(Held(4, False), lambda: place.publisher.publish(stored([1], PROMPT[:4])))


@pytest.mark.anyio
async def test_a_new_life_holds_nothing_of_the_old_one(follow: Follow) -> None:
    place = await follow(stored([1], PROMPT[:4]))
    await place.comes_to(Held(4, True))
    place.publisher.sent.clear()
    place.join("e2")
    assert place.held is None
    await place.comes_to(Held(0, True))


@pytest.mark.anyio
async def test_a_listener_closes_in_the_midst_of_what_it_is_told(follow: Follow) -> None:
    before = [stored([number], [number] * 4) for number in range(5)]
    for pauses in range(40):
        place = await follow(*before, stored([99], PROMPT[:4]))
        place.events.look()
        while place.held != Held(4, place.held is not None and place.held.exact):
            await asyncio.sleep(0)
        for _ in range(pauses % 8):
            await asyncio.sleep(0)
        await asyncio.wait_for(place.events.close(), PATIENCE_SECONDS)


def test_missing_libraries_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq.asyncio", None)
    with pytest.raises(ConfigurationError, match=r"schedloom\[kv-events\]"):
        Events(Fleet([]))


class Told:
    """What the engines hold, as a test says."""

    def __init__(self, held: Held | None) -> None:
        self.held = held
        self.prompts: list[Sequence[int]] = []

    def of_prompt(self, candidate: Any, token_ids: Sequence[int], cache_salt: str | None) -> Held | None:
        self.prompts.append(token_ids)
        return self.held

    def of_session(self, candidate: Any, session: str) -> Held | None:
        return self.held


@pytest.mark.anyio
@pytest.mark.parametrize(("held", "decision"), [(Held(0, True), "pd"), (Held(500, True), "append"), (None, "append")])
async def test_a_futile_attempt_is_not_made(bench: Make, held: Held | None, decision: str) -> None:
    router = await bench(prefiller(), decoder(), policies=[{"name": "kv_residency"}])
    assert (await router.client.chat("s")).decision == "pd"
    router.app._view.residency = Told(held)
    assert (await router.client.chat("s")).decision == decision


@pytest.mark.anyio
@pytest.mark.parametrize("answer", [Answer.of({"tokens": [1, 2, 3]}), Answer.error(500), Answer.of([])])
async def test_prompts_are_tokenized_where_a_policy_asks_for_it(bench: Make, answer: Answer) -> None:
    d = decoder()
    router = await bench(prefiller(), d, policies=[{"name": "kv_residency", "tokenize": True}])
    await router.client.chat("s")
    told = router.app._view.residency = Told(Held(0, False))
    d.script = [answer]
    assert (await router.client.chat("s")).status == 200
    assert told.prompts == ([[1, 2, 3]] if answer.status == 200 and b"tokens" in answer.steps[0] else [])  # type: ignore[operator]
    assert [seen.path for seen in d.seen if seen.path == "/tokenize"] == ["/tokenize"] * 2
    assert router.count("tokenize_seconds_count") == 2


@pytest.mark.anyio
async def test_a_prompt_of_ids_needs_no_tokenizing(bench: Make) -> None:
    d = decoder()
    router = await bench(prefiller(), d, policies=[{"name": "kv_residency", "tokenize": True}])
    router.app._view.residency = told = Told(Held(0, True))
    await router.client.post("/v1/completions", {"model": "fake-model", "prompt": [5, 6, 7]}, {"X-Session-ID": "s"})
    await router.client.post("/v1/completions", {"model": "fake-model", "prompt": [5, 6, 7]}, {"X-Session-ID": "s"})
    assert told.prompts and all(prompt == [5, 6, 7] for prompt in told.prompts)
    assert all(seen.path != "/tokenize" for seen in d.seen)


@pytest.mark.anyio
@pytest.mark.parametrize("forwards", [False, True])
@pytest.mark.parametrize("own", [None, "Bearer own"])
async def test_who_tokenizes_is_shown_the_key_that_whoever_serves_is_shown(
    bench: Make, forwards: bool, own: str | None
) -> None:
    d = decoder()
    settings = {"engine_api_key": "engine-key", "forward_authorization": forwards}
    router = await bench(prefiller(), d, policies=[{"name": "kv_residency", "tokenize": True}], **settings)
    await router.client.post("/v1/completions", {"model": MODEL, "prompt": "a"}, {"authorization": own} if own else {})
    shown = [(seen.path, seen.headers.get("authorization")) for seen in d.seen]
    key = own if forwards else "Bearer engine-key"
    assert shown == [("/tokenize", key), ("/v1/completions", key)]
