"""Fleets that are refused, engines that are left out, and engines that come back."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from unittest.mock import Mock

import pytest

from schedloom.core.errors import ConfigurationError
from schedloom.core.wire import KvEndpoint, Role
from schedloom.router.app import RouterApp
from schedloom.router.fleet.checks import complaint
from schedloom.router.fleet.silence import LEAST_LOOKS, Silences
from schedloom.router.fleet.worker import Health, Worker
from schedloom.router.http.upstream import TimedOut, UpstreamRequest
from schedloom.router.laboratory.clock import simulate
from schedloom.router.requests.call import read_call
from schedloom.router.requests.headers import ClientHeaders
from schedloom.router.serve import tell_doubts
from schedloom.router.settings import WorkerSettings, router_settings
from schedloom.router.tokens import Tokens
from schedloom.router.transfer.modes import Mode
from tests.router.conftest import Make, settings_for
from tests.router.fakes import Answer, FakeEngine, FakeResponse, FakeUpstream, Seen, contract, decoder, prefiller
from tests.router.waiting import until

pytestmark = pytest.mark.anyio


async def started(engines: list[FakeEngine], **settings: Any) -> RouterApp:
    app = RouterApp(settings_for(engines, **settings), FakeUpstream(engines))
    try:
        await app.start()
    finally:
        await app.close()
    return app


async def refusal(engines: list[FakeEngine], **settings: Any) -> str:
    with pytest.raises(ConfigurationError) as refused:
        await started(engines, **settings)
    sentence = str(refused.value)
    assert "\n" not in sentence
    return sentence


async def test_engines_that_fit_are_accepted() -> None:
    app = await started([prefiller(0), prefiller(1), decoder(0), decoder(1)])
    assert [worker.health for worker in app.fleet.workers] == [Health.READY] * 4


ENDPOINT = {"engine_id": "p", "host": "10.0.0.1", "port": 5600}
LAYERWISE: dict[str, Any] = {"kv_connectors": ["MooncakeLayerwiseConnector"]}

MISFITS: dict[str, tuple[list[FakeEngine], str]] = {
    "two models": ([prefiller(), decoder(models=["another"])], "give every engine the same model"),
    "two block sizes": (
        [prefiller(block_size=32), decoder(block_size=64)],
        "start both with the same --block-size",
    ),
    "two connectors": (
        [prefiller(kv_connectors=["NixlConnector"]), decoder(kv_connectors=["MultiConnector", "LMCacheConnectorV1"])],
        "name the same connector",
    ),
    "pull and push": (
        [
            prefiller(kv_connectors=["NixlPushConnector"], kv_endpoints=[ENDPOINT]),
            decoder(kv_connectors=["NixlConnector"]),
        ],
        "name the same connector",
    ),
    "a connector that nobody speaks": (
        [prefiller(kv_connectors=["LMCacheConnectorV1"]), decoder(kv_connectors=["LMCacheConnectorV1"])],
        "which the router does not speak; name the same connector",
    ),
    "push without an endpoint": (
        [prefiller(kv_connectors=["NixlPushConnector"]), decoder(kv_connectors=["NixlPushConnector"])],
        "declare kv_endpoints in its contract",
    ),
    "bidirectional Prefiller only": (
        [prefiller(bidirectional_kv=True), decoder()],
        "set bidirectional_kv_xfer on both or on neither",
    ),
    "bidirectional Decoder only": (
        [prefiller(), decoder(bidirectional_kv=True)],
        "set bidirectional_kv_xfer on both or on neither",
    ),
    "short lease": ([prefiller(kv_lease_seconds=5), decoder()], "raise the engine's kv_lease_duration"),
    "Decoder without append-prefill": (
        [prefiller(), decoder(features=[])],
        '"decoder_append_prefill_enable":true',
    ),
    "Decoder without prefix caching": (
        [prefiller(), decoder(prefix_caching=False)],
        "--enable-prefix-caching",
    ),
    "no connector": (
        [prefiller(), decoder(), FakeEngine("http://x:1", contract(Role.NONE))],
        "--kv-transfer-config",
    ),
    "no contract": ([prefiller(), FakeEngine("http://x:1", None)], "declare its contract under workers"),
    "no Decoder": ([prefiller(), prefiller(1)], "--decode URL"),
    "no Prefiller": ([decoder(), decoder(1)], "--prefill URL"),
}


@pytest.mark.parametrize(("engines", "advice"), MISFITS.values(), ids=MISFITS)
async def test_misfits_are_refused_with_what_to_change(engines: list[FakeEngine], advice: str) -> None:
    assert advice in await refusal(engines)


async def test_a_router_is_no_engine(bench: Make) -> None:
    behind = await bench(prefiller(), decoder(), api_keys=[{"key": "some-key", "tenant": "t"}])

    class AnotherRouter(FakeEngine):
        async def answer(self, seen: Seen) -> Answer:
            received = await behind.client.get(seen.path)
            return Answer(received.status, steps=[received.body])

    told = await refusal([prefiller(1), AnotherRouter("http://r:1", None)])
    assert "http://r:1 is a router, not an engine; name the engines behind it" in told


async def test_all_reasons_against_an_engine_are_told() -> None:
    told = await refusal([prefiller(), decoder(models=["another"], block_size=64, features=[])])
    assert '"decoder_append_prefill_enable":true' in told
    assert "same --block-size" in told and "same model" in told
    assert told.count("besides, ") == 2


async def test_one_reason_is_told_once_however_many_engines_it_concerns() -> None:
    newcomer = (Worker("x", WorkerSettings(url="http://x:1")), contract(Role.CONSUMER, models=["another"]))
    others = [(Worker("d", WorkerSettings(url=f"http://d:{port}")), contract(Role.CONSUMER)) for port in (1, 2)]
    told = complaint(newcomer, others, settings_for([prefiller(), decoder()]))
    assert told is not None and told.count("same model") == 1


async def test_what_a_start_cannot_know_is_said(bench: Make, caplog: pytest.LogCaptureFixture) -> None:
    made = await bench(prefiller(kv_lease_seconds=None), prefiller(1), decoder())
    await tell_doubts(settings_for(made.engines), made.app)
    (said,) = [record.message for record in caplog.records if record.message.startswith("not checked: ")]
    assert f"whether {made.engines[0].origin} keeps KV" in said


async def test_what_a_start_is_refused_for_is_not_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    told = await refusal([prefiller(), decoder(block_size=64)])
    assert "--block-size" in told and "--block-size" not in caplog.text


async def test_without_append_prefill_decoders_need_nothing_of_it() -> None:
    await started([prefiller(), decoder(features=[], prefix_caching=False)], append=False)


async def test_one_connector_by_two_names_is_one_connector() -> None:
    await started([prefiller(kv_connectors=["NixlPullConnector"]), decoder(kv_connectors=["NixlConnector"])])
    several = ["MultiConnector", "NixlConnector", "PreemptOffloadConnector"]
    await started([prefiller(kv_connectors=["NixlConnector"]), decoder(kv_connectors=several)])


@pytest.mark.parametrize(
    ("settings", "advice"),
    [({"host": "0.0.0.0"}, "set callback_url"), ({"port": 0}, "set callback_url"), ({"processes": 2}, "processes: 1")],
)
async def test_decoders_that_ask_need_to_know_where(settings: dict[str, Any], advice: str) -> None:
    engines = [prefiller(**LAYERWISE), decoder(**LAYERWISE)]
    assert advice in await refusal(engines, **settings)
    await started(engines, callback_url="http://10.0.0.9:9000", port=0)


async def test_a_way_of_moving_kv_can_be_declared() -> None:
    p, d = prefiller(), decoder()
    p.contract = d.contract = None
    declared = [
        {"url": engine.origin, "contract": {"role": role, "models": ["m"], "block_size": 16, **LAYERWISE}}
        for engine, role in ((p, "producer"), (d, "consumer"))
    ]
    app = RouterApp(router_settings({"workers": declared}), FakeUpstream([p, d]))
    await app.start()
    assert app.fleet.mode is Mode.LAYERWISE
    await app.close()


@pytest.mark.parametrize(("first", "second"), [("decode", "prefill"), ("prefill", "prefill"), ("decode", "decode")])
async def test_a_role_that_does_not_fit_is_refused(first: str, second: str) -> None:
    p, d = prefiller(), decoder()
    workers = [{"url": p.origin, "role": first}, {"url": d.origin, "role": second}]
    app = RouterApp(router_settings({"workers": workers}), FakeUpstream([p, d]))
    with pytest.raises(ConfigurationError, match="start it with kv_role"):
        await app.start()
    await app.close()


async def test_nobody_reached_is_refused() -> None:
    p, d = prefiller(), decoder()
    d.reachable = False
    sentence = await refusal([p, d])
    assert "no Decoder can be reached" in sentence and d.origin in sentence
    assert "Prefiller" not in sentence
    p.reachable = False
    sentence = await refusal([p, d])
    assert "no Prefiller can be reached" in sentence and "no Decoder can be reached" in sentence


async def test_an_unreadable_contract_is_refused() -> None:
    class Odd(FakeEngine):
        async def answer(self, seen: Any) -> Answer:
            return Answer.of({"protocol": 99})

    assert "same release" in await refusal([prefiller(), Odd("http://odd:1", None)])


async def test_a_start_waits_for_engines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "schedloom.router")
    p, d = prefiller(), decoder()
    d.reachable = False
    app = RouterApp(settings_for([p, d], start_wait_seconds=10), FakeUpstream([p, d]))
    starting = asyncio.create_task(app.start())
    await until(lambda: caplog.text.count("waiting up to"))
    d.reachable = True
    await starting
    await app.close()
    assert app.fleet.serves == "all"
    waiting = f"waiting up to 10 s for {d.origin}"
    joined = [f"engine-{number} joins, at {engine.origin}" for number, engine in enumerate((p, d))]
    assert [record.getMessage() for record in caplog.records] == [joined[0], waiting, joined[1]]


async def test_an_engine_without_schedloom_may_be_declared() -> None:
    p, d = prefiller(), FakeEngine("http://d0:1", None)
    declared = {"role": "consumer", "models": ["fake-model"], "block_size": 16}
    workers = [{"url": p.origin}, {"url": d.origin, "contract": declared}]
    app = RouterApp(router_settings({"workers": workers}), FakeUpstream([p, d]))
    await app.start()
    worker = app.fleet.workers[1]
    lives = [(worker.health, worker.contract.epoch)]
    for reachable in (False, True):
        d.reachable = reachable
        await app.membership.look_at_all()
        lives.append((worker.health, worker.contract.epoch))
    assert [health for health, _ in lives] == [Health.READY, Health.DOWN, Health.READY]
    assert lives[0][1] != lives[2][1]
    await app.close()


async def test_a_misfit_that_joins_later_is_left_out_and_said_once(
    bench: Make, caplog: pytest.LogCaptureFixture
) -> None:
    p, d, late = prefiller(), decoder(0), decoder(1, block_size=64)
    late.reachable = False
    router = await bench(p, d, late)
    late.reachable = True
    with caplog.at_level(logging.WARNING, "schedloom.router"):
        for _ in range(3):
            await router.app.membership.look_at_all()
    absent, misfit = [record.getMessage() for record in caplog.records]
    assert absent.startswith("engine-2 is not there yet: ") and "--block-size" in misfit
    for number in range(4):
        await router.client.chat(str(number))
    assert late.seen == []
    late.contract = contract(Role.CONSUMER, epoch="e2")
    await router.app.membership.look_at_all()
    for number in range(4):
        await router.client.chat(str(number + 4))
    assert len(late.seen) > 0


async def test_a_restart_with_another_configuration_is_noticed(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    d.contract = contract(Role.CONSUMER, epoch="e2", features=[])
    await router.app.membership.look_at_all()
    assert router.app.fleet.workers[1].health is Health.QUARANTINED
    assert (await router.client.chat("s")).status == 503


async def test_engines_are_looked_at_again_and_again(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d, health_interval_seconds=0.02)
    d.contract = contract(Role.CONSUMER, epoch="e2")
    await until(lambda: router.app.fleet.workers[1].contract.epoch == "e2")


@pytest.mark.parametrize(
    "nonsense",
    [
        {"data_parallel_size": 2**40},
        {"data_parallel_size": 2**63},
        {"kv_endpoints": [KvEndpoint.model_construct(engine_id="e", host="h", port=1, tp_size=2**40)]},
    ],
)
async def test_an_engine_that_says_what_makes_no_sense_is_left_out(bench: Make, nonsense: dict[str, Any]) -> None:
    """SEC-1."""
    p, mad, d = prefiller(), decoder(1), decoder()
    router = await bench(p, mad, d, health_interval_seconds=0.01)
    mad.contract = contract(Role.CONSUMER).model_copy(update=nonsense)
    await asyncio.sleep(0.05)
    assert [worker.health for worker in router.app.fleet.workers] == [Health.READY, Health.QUARANTINED, Health.READY]
    mad.contract = contract(Role.CONSUMER)
    await asyncio.sleep(0.05)
    assert router.app.fleet.workers[1].health is Health.READY


async def test_what_goes_wrong_with_one_engine_does_not_end_the_looks(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d, health_interval_seconds=0.01)
    worker = router.app.fleet.workers[1]
    with monkeypatch.context() as patched:
        patched.setattr(Worker, "join", Mock(side_effect=MemoryError("so many")))
        await asyncio.sleep(0.05)
    assert (worker.health, "so many" in worker.trouble) == (Health.QUARANTINED, True)
    await asyncio.sleep(0.05)
    assert router.app.fleet.serves


async def test_trouble_makes_the_router_look_at_once(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d, health_interval_seconds=1000)
    d.reachable = False
    assert (await router.client.chat()).status == 503
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert router.app.fleet.workers[1].health is Health.DOWN


async def test_a_slow_engine_gets_three_looks_before_it_is_down(bench: Make) -> None:
    class Slow(FakeEngine):
        slow = False

        async def answer(self, seen: Any) -> Answer:
            return Answer(200, b"application/json", [TimedOut("slow")]) if self.slow else await super().answer(seen)

    p, d = prefiller(), Slow("http://d0:1", contract(Role.CONSUMER))
    router = await bench(p, d)
    worker = router.app.fleet.workers[1]
    d.slow = True
    seen = []
    for _ in range(3):
        await router.app.membership.look_at_all()
        seen.append(worker.health)
    assert seen == [Health.SUSPECT, Health.SUSPECT, Health.DOWN]
    d.slow = False
    await router.app.membership.look_at_all()
    assert worker.health is Health.READY


async def test_the_engines_key_is_shown_on_every_look() -> None:
    class Locked(FakeEngine):
        async def answer(self, seen: Any) -> Answer:
            if seen.headers.get("authorization") != "Bearer k":
                return Answer.error(401)
            return await super().answer(seen)

    p, d = Locked("http://p0:1", contract(Role.PRODUCER)), Locked("http://d0:1", contract(Role.CONSUMER))
    for key, shown in ((None, "requests without a key"), ("wrong-key", "the router's key")):
        told = await refusal([p, d], engine_api_key=key)
        assert f"http://p0:1 refuses {shown} (status 401)" in told
        assert "set engine_api_key" in told and "wrong-key" not in told
    assert (await started([p, d], engine_api_key="k")).fleet.serves == "all"


class SilentUpstream(FakeUpstream):
    """Nobody answers when asked, but things may come all the same."""

    def __init__(self, engines: list[FakeEngine]) -> None:
        super().__init__(engines)
        self.last = 0.0
        self.given_up: list[str] = []
        self.silent: set[str] = set()

    async def send(self, request: UpstreamRequest) -> FakeResponse:
        if request.origin in self.silent:
            await asyncio.sleep(request.timeouts.first_byte)
            raise TimedOut("silent")
        return await super().send(request)

    def heard_at(self, origin: str) -> float:
        return self.last

    def give_up(self, origin: str) -> int:
        self.given_up.append(origin)
        return 1


def test_an_engine_hangs_when_nothing_came_from_it_for_long_and_three_looks() -> None:
    engines = [prefiller(), decoder(0), decoder(1)]

    async def looks(count: int, seconds: float, hung_after: float = 30.0, heard: bool = False) -> list[str]:
        loop, upstream = asyncio.get_running_loop(), SilentUpstream(engines)
        app = RouterApp(settings_for(engines, hung_after_seconds=hung_after, health_interval_seconds=1e6), upstream)
        await app.start()
        upstream.silent = {engines[1].origin}
        for _ in range(count):
            await app.membership.look_at_all()
            upstream.last = loop.time() if heard else 0.0
            await asyncio.sleep(seconds)
        upstream.silent.clear()
        await app.membership.look_at_all()
        upstream.silent = {engines[1].origin}
        await app.membership.look_at_all()
        await app.close()
        return upstream.given_up

    hung = engines[1].origin
    assert simulate(looks(3, 5.0)) == []
    assert simulate(looks(4, 5.0)) == [hung]
    assert simulate(looks(4, 5.0, heard=True)) == []
    assert simulate(looks(2, 60.0)) == []
    assert simulate(looks(3, 0.0, hung_after=1.0)) == [hung]


class Endless(FakeResponse):
    """One mebibyte in every piece, or a byte a second, for an hour."""

    def __init__(self, engine: FakeEngine, pause: float) -> None:
        super().__init__(engine, Answer(200, b"application/json", [b"a" if pause else bytes(2**20)] * 3600))
        self._pause = pause

    async def read(self) -> bytes:
        await asyncio.sleep(self._pause)
        return await super().read()


class EndlessUpstream(FakeUpstream):
    pause = 0.0
    answers: list[Endless]

    async def send(self, request: UpstreamRequest) -> FakeResponse:
        engine = self.engines[request.origin]
        if engine.contract is not None and request.path != "/tokenize":
            return await super().send(request)
        self.answers.append(Endless(engine, self.pause))
        return self.answers[-1]


@pytest.mark.parametrize("pause", [0.0, 1.0])
def test_an_answer_without_an_end_holds_no_looks_up_and_takes_no_memory(pause: float) -> None:
    p, ours, strange = prefiller(), decoder(0), decoder(1)
    strange.contract = None

    async def looks() -> float:
        loop, upstream = asyncio.get_running_loop(), EndlessUpstream([p, ours, strange])
        upstream.pause, upstream.answers = pause, []
        app = RouterApp(settings_for([p, ours, strange], health_timeout_seconds=5.0), upstream)
        await app.start(is_first=False)
        for _ in range(2):
            await app.membership.look_at_all()
        assert [worker.health for worker in app.fleet.workers] == [Health.READY, Health.READY, Health.DOWN]
        assert all(len(answer._steps) > 3590 for answer in upstream.answers) and strange.open == 0
        tokens = Tokens(upstream, app.fleet, app.membership._settings, app.metrics)
        call = read_call("/v1/completions", ClientHeaders([]), b'{"model": "fake-model", "prompt": "a"}')
        assert await tokens.of(call) is None
        await app.close()
        return loop.time()

    assert simulate(asyncio.wait_for(looks(), 600.0)) < 30.0


@pytest.mark.parametrize(("count", "told"), [(1, "1 request"), (2, "2 requests")])
async def test_how_much_is_given_up_is_told(count: int, told: str, caplog: pytest.LogCaptureFixture) -> None:
    worker, upstream = Worker("engine-1", WorkerSettings(url="http://d0:1")), SilentUpstream([])
    upstream.give_up = lambda origin: count  # type: ignore[method-assign]
    silences = Silences(upstream, 0.0)
    for _ in range(LEAST_LOOKS):
        silences.go_on(worker, asyncio.get_running_loop().time())
    said = "engine-1 hangs, nothing came from it for 0 s: given up there, without output yet: "
    assert caplog.messages == [said + told]
