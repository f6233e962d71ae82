"""A4, B1: engines that come, drain and go while the router serves. No request fails for it, in whatever phase it is."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import random
import re
import weakref
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from schedloom.core.errors import ConfigurationError
from schedloom.core.wire import REJECTION_PREFIX, Role
from schedloom.router.app import RouterApp
from schedloom.router.fleet import changes
from schedloom.router.fleet.roster import Roster
from schedloom.router.fleet.worker import Target, Worker
from schedloom.router.http.client import HttpUpstream
from schedloom.router.http.upstream import UpstreamRequest
from schedloom.router.laboratory.client import Client
from schedloom.router.laboratory.clock import simulate
from schedloom.router.laboratory.engines import MODEL, Faults, SimulatedEngine, SimulatedResponse
from schedloom.router.laboratory.promises import wrongs_of_town
from schedloom.router.laboratory.town import Town
from schedloom.router.laboratory.upstream import SimulatedUpstream
from schedloom.router.settings import WorkerSettings, router_settings
from tests.router.conftest import Bench, Make
from tests.router.fakes import (
    EVENTS,
    Answer,
    FakeEngine,
    Seen,
    contract,
    decoder,
    event_bytes,
    prefiller,
    transfer_parameters,
)
from tests.router.sockets import asgi, served
from tests.router.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio

MOST_CHANGES = 40
LOOK_SECONDS = 0.02
"""How often it is asked who has drained, where the clock is no simulated one."""

WORD = {"choices": [{"index": 0, "text": "word", "finish_reason": None}]}
FINISH = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if asyncio.iscoroutinefunction(request.function):
        monkeypatch.setattr(changes, "LOOK_SECONDS", LOOK_SECONDS)


def held(answer: Answer, gate: asyncio.Event) -> Callable[[Seen], Awaitable[Answer]]:
    """``answer``, when ``gate`` opens."""

    async def later(seen: Seen) -> Answer:
        await gate.wait()
        return answer

    return later


def streamed(gate: asyncio.Event) -> Answer:
    return Answer(200, EVENTS, [event_bytes(WORD), gate, event_bytes(FINISH), event_bytes("[DONE]")])


def whole(**more: Any) -> Answer:
    return Answer.of({"choices": [{"index": 0, "text": "word", "finish_reason": "stop"}], **more})


async def completion(router: Bench, **body: Any) -> Any:
    return await router.client.post("/v1/completions", {"model": "fake-model", "prompt": "a", **body})


async def test_nothing_new_is_sent_to_an_engine_that_drains_and_its_sessions_go_on(bench: Make) -> None:
    p, one, two = prefiller(), decoder(0), decoder(1)
    router = await bench(p, one, two)
    homes = {session: (await router.client.chat(session)).headers["x-schedloom-decoder"] for session in "abcd"}
    assert set(homes.values()) == {"engine-1", "engine-2"}
    router.renew(p, one, two, drain=one)
    seen = len(one.seen)
    moved = {session: await router.client.chat(session) for session in "abcd"}
    assert {turn.headers["x-schedloom-decoder"] for turn in moved.values()} == {"engine-2"}
    assert {moved[session].decision for session in "abcd" if homes[session] == "engine-1"} == {"pd"}
    assert {moved[session].decision for session in "abcd" if homes[session] == "engine-2"} == {"append"}
    for whole_request in range(4):
        assert (await completion(router, n=2)).status == 200, whole_request
    assert len(one.seen) == seen


async def test_a_session_that_did_not_go_on_meanwhile_is_at_home_again_when_the_mark_is_taken_away(
    bench: Make,
) -> None:
    p, one, two = prefiller(), decoder(0), decoder(1)
    router = await bench(p, one, two)
    homes = {session: (await router.client.chat(session)).headers["x-schedloom-decoder"] for session in "ab"}
    router.renew(p, one, two, drain=one)
    await until(lambda: router.states["engine-1"] == "drained")
    router.renew(p, one, two)
    assert router.states["engine-1"] == "suspect"
    await until(lambda: router.states["engine-1"] == "ready")
    for session, home in homes.items():
        turn = await router.client.chat(session)
        assert (turn.decision, turn.headers["x-schedloom-decoder"]) == ("append", home)


async def test_how_a_drain_goes_is_shown_and_logged(bench: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "schedloom.router")
    p, d, gate = prefiller(), decoder(0), asyncio.Event()
    router = await bench(p, d)
    d.always = streamed(gate)
    asked = asyncio.create_task(completion(router, stream=True))
    await until(lambda: len(d.seen) == 1)
    router.renew(p, d, drain=d)
    await asyncio.sleep(2 * LOOK_SECONDS)
    ready = await router.client.get("/ready")
    assert (ready.status, ready.json["engines"]["engine-1"]) == (503, "draining")
    page = (await router.client.get("/metrics")).body.decode()
    assert 'schedloom_router_engine_state{engine="engine-1",state="draining"} 1.0' in page
    assert 'schedloom_router_engine_state{engine="engine-1",state="ready"} 0.0' in page
    assert 'schedloom_router_engine_in_flight{engine="engine-1",rank="0"} 1.0' in page
    refused = [await asyncio.wait_for(completion(router, n=n), PATIENCE_SECONDS) for n in (1, 2)]
    assert [(one.status, one.json["error"]["code"]) for one in refused] == [(503, "no_decoder")] * 2
    assert (await router.client.get("/v1/models")).json["data"] == []
    gate.set()
    assert (await asked).body.endswith(b"data: [DONE]\n\n")
    await until(lambda: router.states["engine-1"] == "drained")
    await router.app.membership.look_at_all()
    assert router.states["engine-1"] == "drained"
    assert b'state="drained"} 1.0' in (await router.client.get("/metrics")).body
    said = [record.getMessage() for record in caplog.records if "engine-1" in record.getMessage()]
    assert said == [f"engine-1 joins, at {d.origin}", "engine-1 drains", "engine-1 has drained"]


async def test_whoever_is_missing_is_told_with_what_is_still_served(
    bench: Make, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    nothing = "every request is answered 503 until one joins"
    for draining, serves, sentence in (
        ([d], "nothing", f"no Decoder is left: {nothing}"),
        ([p], "some", "no Prefiller is left: what Decoders do alone is served, and requests that need both are "),
        ([p, d], "nothing", f"no Prefiller and no Decoder is left: {nothing}"),
    ):
        caplog.clear()
        router.app.roster.renew([WorkerSettings(url=one.origin, drain=one in draining) for one in (p, d)])
        router.app.renew()
        (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert told.startswith(sentence) and router.app.fleet.serves == serves
        router.renew(p, d)
        await until(lambda: set(router.states.values()) == {"ready"})


async def test_a_prefiller_has_not_drained_while_its_kv_is_still_to_be_taken(bench: Make) -> None:
    p, other, d, gate, end = prefiller(0), prefiller(1), decoder(), asyncio.Event(), asyncio.Event()
    router = await bench(p, other, d)
    d.always = Answer(200, EVENTS, [gate, event_bytes(WORD), end, event_bytes(FINISH), event_bytes("[DONE]")])
    asked = [asyncio.create_task(completion(router, stream=True)) for _ in range(2)]
    await until(lambda: len(d.seen) == 2)
    assert router.in_flight == [0, 0, 2]
    router.renew(p, other, d, drain=p)
    await asyncio.sleep(2 * LOOK_SECONDS)
    assert router.states["engine-0"] == "draining"
    gate.set()
    await until(lambda: router.states["engine-0"] == "drained")
    end.set()
    assert {(await one).body[-14:] for one in asked} == {b"data: [DONE]\n\n"}


async def test_an_engine_that_the_file_names_no_more_ends_what_is_under_way_and_is_forgotten(bench: Make) -> None:
    p, one, two, gate = prefiller(), decoder(0), decoder(1), asyncio.Event()
    router = await bench(p, one, two)
    for engine in (one, two):
        engine.always = streamed(gate)
    asked = [asyncio.create_task(completion(router, stream=True)) for _ in range(4)]
    await until(lambda: len(one.seen) + len(two.seen) == 4)
    router.renew(p, two)
    late = asyncio.create_task(completion(router, stream=True))
    await asyncio.sleep(2 * LOOK_SECONDS)
    assert router.states == {"engine-0": "ready", "engine-1": "draining", "engine-2": "ready"}
    assert len(one.seen) == 2
    gate.set()
    assert {(await answer).status for answer in (*asked, late)} == {200}
    await until(lambda: "engine-1" not in router.states)
    page = (await router.client.get("/metrics")).body.decode()
    assert "engine-2" in page and "engine-1" not in page


async def test_a_newcomer_joins_at_once_and_a_misfit_is_left_out(bench: Make, caplog: pytest.LogCaptureFixture) -> None:
    p, one, two, odd, absent = prefiller(), decoder(0), decoder(1), decoder(2, block_size=64), decoder(3)
    absent.reachable = False
    router = await bench(p, one, health_interval_seconds=1000)
    router.renew(p, one, two, odd, absent)
    await until(lambda: router.states["engine-2"] == "ready")
    assert router.states["engine-3"] == "quarantined" and router.states["engine-4"] == "down"
    for session in "abcd":
        assert (await router.client.chat(session)).status == 200
    assert one.seen and two.seen and not odd.seen
    said = [record.getMessage() for record in caplog.records]
    assert len([text for text in said if "--block-size" in text]) == 1
    assert f"engine-4 is not there yet: {absent.origin}: refused" in said
    absent.reachable = True
    await router.app.membership.look_at_all()
    assert router.states["engine-4"] == "ready"


async def test_what_cannot_be_known_of_a_newcomer_is_said(bench: Make, caplog: pytest.LogCaptureFixture) -> None:
    p, d, late = prefiller(), decoder(), prefiller(1, kv_lease_seconds=None)
    router = await bench(p, d)
    router.renew(p, d, late)
    await until(lambda: any(f"whether {late.origin} keeps KV" in one.message for one in caplog.records))


async def test_a_newcomer_must_fit_those_who_drain_too(bench: Make) -> None:
    """What is under way on them may go on on it, and a mark may be taken away."""
    p, d, odd = prefiller(), decoder(), decoder(1, block_size=64)
    router = await bench(p, d)
    router.upstream.engines[odd.origin] = odd
    there = [WorkerSettings(url=engine.origin, drain=True) for engine in (p, d)]
    router.app.roster.renew([*there, WorkerSettings(url=odd.origin)])
    router.app.renew()
    await until(lambda: router.states["engine-2"] == "quarantined")


async def test_a_name_is_given_once() -> None:
    first, second, third = (WorkerSettings(url=f"http://h{n}:1", role="decode") for n in range(3))
    roster = Roster([first, second])
    roster.renew([second.model_copy(update={"drain": True}), third])
    assert list(roster.engines) == ["decoder-1", "decoder-2"]
    roster.renew([first, second, third])
    assert list(roster.engines) == ["decoder-3", "decoder-1", "decoder-2"]
    roster.renew([first, WorkerSettings(url=second.url, role="prefill")])
    assert list(roster.engines) == ["decoder-3", "prefiller-0"]


async def test_a_name_of_its_own_is_kept_whatever_the_order_and_given_to_no_other() -> None:
    first, second = (WorkerSettings(url=f"http://h{name}:1", role="decode", name=name) for name in "ab")
    third = WorkerSettings(url="http://hc:1", role="decode")
    roster = Roster([third, first, second])
    assert list(roster.engines) == ["decoder-0", "a", "b"]
    roster.renew([second, third])
    roster.renew([first.model_copy(update={"drain": True}), third, second])
    assert list(roster.engines) == ["a", "decoder-0", "b"]
    roster.renew([second])
    for other in (third.model_copy(update={"name": "a"}), first.model_copy(update={"role": "prefill"})):
        with pytest.raises(ConfigurationError, match="cannot be named a, which is the name of the one "):
            roster.renew([other])
    assert list(roster.engines) == ["b"]
    roster.renew([first, second.model_copy(update={"name": None})])
    assert list(roster.engines) == ["a", "decoder-1"]


async def test_engines_are_shown_by_the_names_of_their_own(bench: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "schedloom.router")
    p, d = prefiller(), decoder()
    router = await bench(p, d, workers=[{"url": p.origin, "name": "gpu7"}, {"url": d.origin, "name": "gpu8"}])
    assert (await router.client.chat("s")).headers["x-schedloom-decoder"] == "gpu8"
    assert (await router.client.get("/ready")).json["engines"] == {"gpu7": "ready", "gpu8": "ready"}
    page = (await router.client.get("/metrics")).body.decode()
    assert 'engine_state{engine="gpu7",state="ready"} 1.0' in page and "engine-" not in page
    assert f"gpu8 joins, at {d.origin}" in caplog.messages
    assert (await router.client.chat("s")).decision == "append"


@pytest.mark.parametrize("gone", [False, True], ids=["drains", "gone"])
async def test_an_engine_comes_back_under_the_name_of_its_own(bench: Make, gone: bool) -> None:
    """As itself while it drains still. Once it was forgotten nobody knows whether it was restarted meanwhile, where it
    does not tell its epoch.
    """
    p, d, gate = prefiller(), FakeEngine("http://d0:1", None), asyncio.Event()
    declared = {"role": "consumer", "models": ["fake-model"], "block_size": 16, "features": ["append_prefill"]}
    workers = [{"url": p.origin}, {"url": d.origin, "name": "a", "contract": declared}]
    router = await bench(p, d, workers=workers)
    assert (await router.client.chat("s")).headers["x-schedloom-decoder"] == "a"
    d.script = [streamed(gate)]
    asked = asyncio.create_task(completion(router, stream=True))
    await until(lambda: len(d.seen) == 2)
    if gone:
        gate.set()
    for count in (1, 2):
        router.app.roster.renew([WorkerSettings.model_validate(one) for one in workers[:count]])
        router.app.renew()
        await asyncio.sleep(4 * LOOK_SECONDS)
        assert ("a" in router.states) is (count == 2 or not gone)
    await until(lambda: router.states["a"] == "ready")
    assert (await router.client.chat("s")).decision == ("pd" if gone else "append")
    gate.set()
    assert (await asked).status == 200
    assert list(router.states) == ["engine-0", "a"]


async def test_what_is_kept_while_others_are_seen_off_has_not_drained(bench: Make) -> None:
    p, one, two = prefiller(), decoder(0), decoder(1)
    router = await bench(p, one, two, health_interval_seconds=1000)
    forget = router.app.membership.forget

    async def forget_late(worker: Worker) -> None:
        router.renew(p, two)
        await until(lambda: router.states["engine-2"] == "ready")
        await forget(worker)

    router.app.membership.forget = forget_late  # type: ignore[method-assign]
    router.renew(p, two, drain=two)
    await until(lambda: "engine-1" not in router.states)
    await asyncio.sleep(3 * LOOK_SECONDS)
    assert router.states == {"engine-0": "ready", "engine-2": "ready"}


async def test_an_engine_that_is_named_again_has_nothing_of_its_former_self(bench: Make) -> None:
    p, one, two, gate = prefiller(), decoder(0), decoder(1), asyncio.Event()
    router = await bench(p, one)
    assert (await router.client.chat("s")).headers["x-schedloom-decoder"] == "engine-1"
    one.script = [streamed(gate)]
    asked = asyncio.create_task(completion(router, stream=True))
    await until(lambda: len(one.seen) == 2)
    router.renew(p, two)
    router.renew(p, one)
    await until(lambda: router.states.get("engine-3") == "ready")
    turn = await router.client.chat("s")
    assert (turn.decision, turn.headers["x-schedloom-decoder"]) == ("pd", "engine-3")
    gate.set()
    assert (await asked).status == 200
    await until(lambda: list(router.states) == ["engine-0", "engine-3"])


async def test_an_engine_that_is_gone_is_looked_at_no_longer(bench: Make) -> None:
    class Silent(FakeEngine):
        is_silent = False

        async def answer(self, seen: Seen) -> Answer:
            if self.is_silent:
                await asyncio.Event().wait()
            return await super().answer(seen)

    p, d, silent = prefiller(), decoder(0), Silent("http://d1:1", contract(Role.CONSUMER))
    router = await bench(p, d, silent, health_interval_seconds=1000)
    silent.is_silent = True
    looking = asyncio.create_task(router.app.membership.look_at_all())
    await asyncio.sleep(LOOK_SECONDS)
    router.renew(p, d)
    await until(lambda: "engine-2" not in router.states)
    await asyncio.wait_for(looking, 5)
    assert router.app.membership._looks == {}


async def test_nothing_is_kept_of_what_an_engine_that_is_gone_told(bench: Make) -> None:
    p, other, d = prefiller(0), prefiller(1), decoder()
    p.contract = contract(Role.PRODUCER, kv_endpoints=[])
    router = await bench(p, d)
    assert (await completion(router)).status == 200
    p.always = whole(kv_transfer_params={"remote_host": [1]})
    assert (await completion(router)).status == 502
    assert router.count("transfer_refusals_total", engine="engine-0") == 1
    gone = weakref.ref(router.app.fleet.workers[0])
    router.renew(other, d)
    await until(lambda: router.app.fleet.serves == "all" and "engine-0" not in router.states)
    await asyncio.sleep(2 * LOOK_SECONDS)
    gc.collect()
    assert gone() is None
    assert b"engine-0" not in (await router.client.get("/metrics")).body


async def test_a_restart_while_it_drains_ends_its_sessions_life(bench: Make) -> None:
    """It does not tell its epoch, so that only the trouble with it shows that it may have been restarted."""
    p, d = prefiller(), FakeEngine("http://d0:1", None)
    declared = {"role": "consumer", "models": ["fake-model"], "block_size": 16, "features": ["append_prefill"]}
    workers: list[dict[str, Any]] = [{"url": p.origin}, {"url": d.origin, "contract": declared}]
    router = await bench(p, d, workers=workers)
    epoch = router.app.fleet.workers[1].contract.epoch
    for drain in (True, False):
        router.app.roster.renew(
            [WorkerSettings.model_validate({**worker, "drain": drain and "contract" in worker}) for worker in workers]
        )
        router.app.renew()
        d.reachable = not drain
        await router.app.membership.look_at_all()
    assert router.states["engine-1"] == "ready" and router.app.fleet.workers[1].contract.epoch != epoch


PHASES = ["prefill", "hand-over", "stream", "append", "whole", "waiting"]


@pytest.mark.parametrize("leaves", ["marked", "gone"])
@pytest.mark.parametrize("kind", ["Prefiller", "Decoder"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("replaced", [True, False])
async def test_no_request_that_is_under_way_fails(
    bench: Make, phase: str, kind: str, leaves: str, replaced: bool
) -> None:
    """The engine that leaves is the only one of its kind, and another is there in its place, or none."""
    p, d, gate = prefiller(), decoder(), asyncio.Event()
    more = {"max_in_flight": 1} if phase == "waiting" else {}
    router = await bench(p, d, **more)
    await router.client.chat("s")
    parameters = {"kv_transfer_params": transfer_parameters()}
    if phase == "prefill":
        p.script = [held(whole(**parameters), gate)]
    elif phase in ("hand-over", "append", "whole"):
        d.script = [held(whole(), gate)]
    else:
        d.script = [streamed(gate)]
    body = {"stream": phase in ("stream", "waiting"), "n": 2 if phase == "whole" else 1}
    headers = {"X-Session-ID": "s"} if phase == "append" else {}
    prompt = {"model": "fake-model", "prompt": "a"}
    asked = asyncio.create_task(router.client.post("/v1/completions", prompt | body, headers))
    held_by = p if phase == "prefill" else d
    before = len(held_by.seen)
    await until(lambda: len(held_by.seen) == before + 1 and (phase != "append" or held_by.seen[-1].is_local_attempt))
    leaving, other = (p, d) if kind == "Prefiller" else (d, p)
    newcomers = [prefiller(7) if kind == "Prefiller" else decoder(7)] if replaced else []
    if leaves == "marked":
        router.renew(leaving, other, *newcomers, drain=leaving)
    elif newcomers:
        router.renew(other, *newcomers)
    else:
        router.renew(other)
    await asyncio.sleep(1.5 * LOOK_SECONDS)
    gate.set()
    received = await asked
    assert received.status == 200 and b"error" not in received.body
    await until(lambda: router.states.get("engine-0" if kind == "Prefiller" else "engine-1") in ("drained", None))


@pytest.mark.parametrize("leaves", ["marked", "gone"])
async def test_a_turned_away_turn_of_a_router_whose_prefillers_drain_may_still_go_by_one(
    bench: Make, leaves: str
) -> None:
    p, d, gate = prefiller(), decoder(), asyncio.Event()
    router = await bench(p, d)
    await router.client.chat("s")
    rejected = d._whole(Seen("/v1/chat/completions", {}, b"{}"), 0, "stop", f"{REJECTION_PREFIX}no_usable_prefix")
    d.script = [held(Answer.of(rejected), gate)]
    before = len(d.seen)
    asked = asyncio.create_task(router.client.chat("s"))
    await until(lambda: len(d.seen) == before + 1)
    if leaves == "marked":
        router.renew(p, d, drain=p)
    else:
        router.renew(d)
    await asyncio.sleep(2 * LOOK_SECONDS)
    assert router.states["engine-0"] == "draining"
    gate.set()
    received = await asked
    assert (received.status, received.decision) == (200, "fallback")
    await until(lambda: router.states.get("engine-0") in ("drained", None))
    d.holds = False
    assert (await router.client.chat("s")).status == 503
    assert (await router.client.chat("t")).status == 503


@pytest.mark.parametrize("failing", ["Prefiller", "Decoder"])
async def test_what_fails_is_tried_again_by_others_though_the_last_of_the_other_kind_drains(
    bench: Make, failing: str
) -> None:
    p, d, gate = prefiller(), decoder(), asyncio.Event()
    one, last = (p, d) if failing == "Prefiller" else (d, p)
    other = prefiller(7) if failing == "Prefiller" else decoder(7)
    router = await bench(one, last, other)
    one.script = [held(Answer.error(500), gate)]
    asked = [asyncio.create_task(completion(router)) for _ in range(2)]
    await until(lambda: len(one.seen) == 1)
    router.renew(one, last, other, drain=last)
    await asyncio.sleep(2 * LOOK_SECONDS)
    gate.set()
    assert {(await received).status for received in asked} == {200}


class Watched(SimulatedUpstream):
    """Writes down what began after its engine was closed to it."""

    def __init__(self, town: Changing) -> None:
        super().__init__(town.engines, town.ledger)
        self._town = town

    async def send(self, request: UpstreamRequest) -> SimulatedResponse:
        body = json.loads(request.body or "{}")
        if body.get("model") == MODEL:
            label = str(body.get("user") or bytes(body["prompt"]).partition(b"\0")[0].decode())
            if self._town.begun[label] > self._town.closed.get(request.origin, math.inf):
                self.ledger.wrongs.append(f"{label}: sent to an engine that drains")
        return await super().send(request)


class Changing(Town):
    """A fleet whose engines are marked, unmarked, taken out and replaced at random while clients are served. Of each
    kind one stays, and does not stop. ``begun`` and ``closed`` are when a turn and an engine's drain began.
    """

    def __init__(self, seed: int, faults: Faults | None, **more: Any) -> None:
        super().__init__(seed, faults, **more)
        self.changes = 0
        self.begun: dict[str, float] = {}
        self.closed: dict[str, float] = {}
        self._fate = random.Random(seed + 1)
        self._places = [WorkerSettings(url=engine.origin) for engine in self.engines]
        self._stay = {self.engines[0].origin, self.engines[-1].origin}
        for engine in (self.engines[0], self.engines[-1]):
            engine.faults = replace(engine.faults, stop=0.0)

    async def play(self, clients: int = 4, turns: int = 4) -> None:
        changing = asyncio.ensure_future(self._keep_changing())
        await super().play(clients, turns)
        changing.cancel()

    async def _keep_changing(self) -> None:
        while self.changes < MOST_CHANGES:
            await asyncio.sleep(self._fate.uniform(0, 2))
            if hasattr(self, "app"):
                self._change()

    def _change(self) -> None:
        self.changes += 1
        places = [self._changed(place) for place in self._places]
        self._places = [place for place in places if place is not None]
        if len(self._places) < 7:
            self._places.append(WorkerSettings(url=self._newcomer()))
        self.app.roster.renew(self._places)
        self.app.renew()
        open_, now = {place.url for place in self._places if not place.drain}, asyncio.get_running_loop().time()
        self.closed = {one.origin: self.closed.get(one.origin, now) for one in self.engines if one.origin not in open_}

    async def _turn(self, label: str, session: str | None, before: Mapping[str, Any]) -> None:
        self.begun[label] = asyncio.get_running_loop().time()
        await super()._turn(label, session, before)

    def _upstream(self) -> SimulatedUpstream:
        return Watched(self)

    def _changed(self, place: WorkerSettings) -> WorkerSettings | None:
        if place.url in self._stay or self._fate.random() < 0.6:
            return place
        return None if self._fate.random() < 0.3 else place.model_copy(update={"drain": not place.drain})

    def _newcomer(self) -> str:
        role = self._fate.choice([Role.PRODUCER, Role.CONSUMER])
        model = self._fate.choice(self.engines)
        engine = SimulatedEngine(f"http://n{self.changes}:1", role, self.random, model.faults)
        engine.recomputes = role is Role.CONSUMER and self._fate.random() < 0.7
        self.engines.append(engine)
        self.app._upstream.engines[engine.origin] = engine  # type: ignore[attr-defined]
        return engine.origin


@pytest.mark.parametrize("policies", [(), ("prefix_aware", "ttft_slo", "least_tokens")], ids=["none", "three"])
def test_without_faults_every_request_is_served_while_the_fleet_changes(policies: tuple[str, ...]) -> None:
    changed, routes = 0, set()
    for seed in range(60):
        town = Changing(seed, Faults(), policies=policies)
        simulate(town.play())
        assert wrongs_of_town(town) == [], f"seed {seed}"
        assert {turn.received.status for turn in town.turns if not turn.left} == {200}, f"seed {seed}"
        changed += town.changes
        routes |= {turn.received.headers.get("x-schedloom-decision", "none") for turn in town.turns}
    assert changed > 300 and routes >= {"pd", "append"}


def test_requests_that_are_handed_back_all_succeed_while_the_fleet_changes() -> None:
    handed_back = 0
    for seed in range(60):
        town = Changing(seed, Faults(hand_back=0.6))
        simulate(town.play())
        assert wrongs_of_town(town) == [], f"seed {seed}"
        assert {turn.received.status for turn in town.turns if not turn.left} == {200}, f"seed {seed}"
        handed_back += sum(town.ledger.handed_back.values())
    assert handed_back > 100


def test_nothing_goes_wrong_under_any_fault_while_the_fleet_changes() -> None:
    for seed in range(100):
        town = Changing(seed, None)
        simulate(town.play())
        assert wrongs_of_town(town) == [], f"seed {seed}"


def _sizes(app: RouterApp) -> dict[str, int]:
    """Whatever could hold an engine, or its name."""
    fleet, upstream = app.fleet, app._upstream
    assert isinstance(upstream, HttpUpstream)
    return {
        "workers": len(fleet.workers),
        "names": len(fleet._by_name),
        "roster": len(app.roster.engines),
        "looks": len(app.membership._looks),
        "origins": len(upstream._idle),
        "passes": len(app._attempts.beginning) + len(app._attempts._resuming),
        "pages": len(app.metrics.exposition().splitlines()),
        "targets": sum(issubclass(type(one), Worker | Target) for one in gc.get_objects()),
    }


def _grown(early: Mapping[str, int], app: RouterApp) -> list[str]:
    gc.collect()
    return [name for name, size in _sizes(app).items() if size > early[name]]


def at_any_number(engine: FakeEngine) -> ASGIApp:
    """The engine at ``/`` and at ``/NUMBER``."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asgi(engine)({**scope, "path": re.sub(r"^/\d+", "", scope["path"])}, receive, send)

    return app


def _asks_nobody(app: RouterApp) -> bool:
    """Whether every connection to an engine waits for a request: no look is under way either."""
    upstream = app._upstream
    assert isinstance(upstream, HttpUpstream)
    return len(upstream._open) == sum(map(len, upstream._idle.values()))


async def test_nothing_is_left_of_a_thousand_engines_that_came_and_went() -> None:
    async with AsyncExitStack() as stack:
        engines = [prefiller(), decoder()]
        p, d = [await stack.enter_async_context(served(at_any_number(engine))) for engine in engines]
        policies = [{"name": name} for name in ("session_owner", "prefix_aware", "ttft_slo")]
        app = RouterApp(router_settings({"workers": [{"url": p}, {"url": d}], "policies": policies}))
        await app.start()
        stack.push_async_callback(app.close)
        client, early = Client(app), _sizes(app)
        for number in range(1000):
            app.roster.renew([WorkerSettings(url=p), WorkerSettings(url=d if number % 2 else f"{d}/{number}")])
            app.renew()
            if number % 50 == 1:
                await until(lambda: app.fleet.serves == "all" and len(app.fleet.workers) == 2)
                assert (await client.chat("s", messages=[{"role": "user", "content": "x" * 3000}])).status == 200
            if number == 101:
                await asyncio.sleep(0.5)
                await until(lambda: _asks_nobody(app))
                gc.collect()
                early = _sizes(app)
        await until(lambda: not _grown(early, app))
