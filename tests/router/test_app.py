"""The endpoints around generation, and the edges of requests."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from schedloom import __version__
from schedloom.core.errors import ConfigurationError
from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy
from schedloom.core.routing import Attempt, Route, SessionOwner
from schedloom.core.wire import Role
from schedloom.router.app import RouterApp
from schedloom.router.laboratory.client import Client
from schedloom.router.serve import told_to_stop
from tests.router.conftest import Bench, Make, settings_for
from tests.router.fakes import Answer, FakeUpstream, contract, decoder, prefiller
from tests.router.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


async def test_the_pages_around(bench: Make) -> None:
    router = await bench(prefiller(max_model_len=4096), decoder(max_model_len=4096))
    models = (await router.client.get("/v1/models")).json["data"]
    assert [(model["id"], model["object"], model["max_model_len"]) for model in models] == [
        ("fake-model", "model", 4096)
    ]
    assert (await router.client.get("/health")).status == 200
    ready = await router.client.get("/ready")
    assert (ready.status, ready.json["engines"]) == (200, {"engine-0": "ready", "engine-1": "ready"})
    assert (await router.client.get("/version")).json == {"version": __version__}


@pytest.mark.parametrize("name", ["fake-model", "some/model with/slashes"])
async def test_a_model_is_told_of_by_its_name(bench: Make, name: str) -> None:
    p, d = prefiller(models=[name]), decoder(models=[name], max_model_len=4096)
    router = await bench(p, d)
    listed = (await router.client.get("/v1/models")).json["data"]
    one = await router.client.get(f"/v1/models/{name}")
    assert (one.status, [one.json]) == (200, listed)
    assert (await router.client.post(f"/v1/models/{name}", {})).headers["allow"] == "GET, HEAD"
    d.reachable = False
    await router.app.membership.look_at_all()
    for path in (name, "other", ""):
        received = await router.client.get(f"/v1/models/{path}")
        assert (received.status, received.json["error"]["code"]) == (404, "model_not_found")
        assert received.json["error"]["type"] == "not_found_error"


async def test_a_model_is_told_of_to_those_with_a_key(bench: Make) -> None:
    router = await bench(prefiller(), decoder(), api_keys=[{"key": "some-key-1", "tenant": "t"}])
    assert (await router.client.get("/v1/models/fake-model")).status == 401


READY: dict[str, tuple[list[str], list[str], bool, str]] = {
    "all are there": ([], [], True, "all"),
    "all are suspect": ([], ["p", "d"], True, "all"),
    "nobody was reached yet": (["p", "d"], [], True, "nothing"),
    "no Prefiller, with append": (["p"], [], True, "some"),
    "no Prefiller, without append": (["p"], [], False, "some"),
    "no Prefiller, and a suspect Decoder": (["p"], ["d"], True, "some"),
    "no Decoder": (["d"], [], True, "nothing"),
}
"""Who is away, who is suspect, whether append is on, and what is served then."""


@pytest.mark.parametrize(("away", "suspect", "append", "serves"), READY.values(), ids=READY)
async def test_a_router_is_ready_while_it_can_serve_some_request(
    bench: Make, away: list[str], suspect: list[str], append: bool, serves: str
) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d, append=append, health_interval_seconds=1000)
    assert (await router.client.chat("known")).decision == "pd"
    p.reachable, d.reachable = "p" not in away, "d" not in away
    await router.app.membership.look_at_all()
    for name, worker in zip("pd", router.app.fleet.workers, strict=True):
        if name in suspect:
            worker.suspect()
    ready = await router.client.get("/ready")
    assert (ready.json["ready"], ready.json["serves"]) == (serves != "nothing", serves)
    asked = [await router.client.chat("known"), await router.client.chat("new"), await router.client.chat(n=2)]
    served = [one.status == 200 for one in asked]
    assert (ready.status == 200) is any(served) and (serves == "all") is all(served)
    if serves == "some":
        assert served == [append and not suspect, False, True]


async def test_a_router_is_ready_without_engines_only_when_they_come(bench: Make) -> None:
    """As a process is that others serve beside, so that it does not wait for them."""
    engines = [prefiller(), decoder()]
    app = RouterApp(settings_for(engines), FakeUpstream(engines))
    client, told = Client(app), []
    for reachable in (False, True):
        for engine in engines:
            engine.reachable = reachable
        await (app.membership.look_at_all() if reachable else app.start(is_first=False))
        ready = await client.get("/ready")
        told.append((ready.status, ready.json["serves"]))
    await app.close()
    assert told == [(503, "nothing"), (200, "all")]


@pytest.mark.parametrize(("drains", "status", "serves"), [(0, 200, "some"), (1, 503, "nothing")])
async def test_what_a_fleet_serves_of_which_a_part_drains(bench: Make, drains: int, status: int, serves: str) -> None:
    p, d = engines = prefiller(), decoder()
    router = await bench(p, d)
    router.renew(p, d, drain=engines[drains])
    ready = await router.client.get("/ready")
    assert (ready.status, ready.json["serves"]) == (status, serves)


async def test_a_router_that_stops_is_not_ready(bench: Make) -> None:
    router = await bench(prefiller(), decoder())
    router.app.drain()
    ready = await router.client.get("/ready")
    assert (ready.status, ready.json["ready"], ready.json["serves"]) == (503, False, "nothing")
    assert (await router.client.chat("s")).status == 503


async def test_from_the_signal_on_nothing_new_is_taken(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    with told_to_stop(router.app) as stopping:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stopping.wait(), PATIENCE_SECONDS)
    received = await router.client.chat("s")
    assert (received.status, received.headers["retry-after"]) == (503, "1")
    assert (await router.client.get("/ready")).status == 503
    assert (await router.client.get("/health")).status == 200
    assert p.seen == []


UNLISTED = (
    "/ /pause /abort_requests /update_weights /collective_rpc /invocations /schedloom/contract /server_info "
    "/v1 /v1/chat/completions/ /v1//chat/completions /docs /resume /sleep /wake_up /is_sleeping /init_weight_transfer "
    "/reset_prefix_cache /reset_mm_cache /tokenizer_info /v1/load_lora_adapter /v1/unload_lora_adapter /load /ping "
    "/scale_elastic_ep /inference/v1/generate /start_profile /stop_profile /pooling /classify /score /redoc /config"
)


@pytest.mark.parametrize("path", UNLISTED.split())
async def test_what_is_not_listed_does_not_exist(bench: Make, path: str) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    for received in (await router.client.get(path), await router.client.post(path, {})):
        assert (received.status, received.json["error"]["code"]) == (404, "not_found")
    assert p.seen == d.seen == []


@pytest.mark.unforeseen
async def test_what_went_wrong_within_is_for_the_log_only(
    bench: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("at 0x7f00 of /etc/secret")

    router = await bench(prefiller(), decoder())
    monkeypatch.setattr(router.app.door.pipeline, "serve", fail)
    received = await router.client.chat("s")
    assert (received.status, received.json["error"]["code"]) == (500, "internal_error")
    assert b"0x7f00" not in received.body and "0x7f00" in caplog.text
    assert router.count("requests_total", route="none", outcome="failed") == 1


async def test_no_log_names_a_session(bench: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    for status in (200, 500, 503, 400):
        d.script = [] if status == 200 else [Answer.error(status)]
        for _ in range(2):
            assert await router.client.chat("secret-session", conversation_id="secret-too")
    d.reachable = False
    await router.client.chat("secret-session")
    await router.app.membership.look_at_all()
    assert "engine-1" in caplog.text and "secret" not in caplog.text


async def test_a_wrong_method_is_told(bench: Make) -> None:
    router = await bench(prefiller(), decoder())
    received = await router.client.get("/v1/completions")
    assert (received.status, received.json["error"]["code"]) == (405, "method_not_allowed")
    assert received.headers["allow"] == "POST"


async def test_a_policy_of_engines_is_refused_at_the_start() -> None:
    settings = settings_for([prefiller(), decoder()], policies=[{"name": "append_prefill"}])
    with pytest.raises(ConfigurationError, match="no hook that the router calls; choose it for the engine"):
        RouterApp(settings)


async def test_a_body_has_a_largest_size(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d, max_body_bytes=2000)
    received = await router.client.post("/v1/completions", {"prompt": "x" * 2000})
    assert (received.status, received.json["error"]["code"]) == (413, "body_too_large")
    assert p.seen == []


async def test_bad_json_is_the_clients_error_and_counted_as_such(bench: Make) -> None:
    router = await bench(prefiller(), decoder())
    received = await router.client.post("/v1/completions", b"{")
    assert (received.status, received.json["error"]["type"]) == (400, "invalid_request_error")
    assert router.count("requests_total", route="none", outcome="refused") == 1


async def test_figures_are_there_and_no_session_is_in_them(bench: Make) -> None:
    router = await bench(prefiller(), decoder())
    for number in range(20):
        for _ in range(2):
            await router.client.chat(f"secret-{number}", stream=True)
    page = (await router.client.get("/metrics")).body.decode()
    assert "secret" not in page
    assert router.count("requests_total", route="pd", outcome="served") == 20
    assert router.count("requests_total", route="append", outcome="served") == 20
    assert router.count("local_attempts_total") == 20
    assert router.count("time_to_first_byte_seconds_count", route="append") == 20
    assert len(page.splitlines()) < 250


async def test_how_engines_stand_and_who_waits_is_told_when_it_is_asked(bench: Make) -> None:
    p, d = prefiller(), decoder(data_parallel_size=2)
    router = await bench(p, d, max_in_flight=1)
    goes_on = asyncio.Event()

    async def slow(_: Any) -> Answer:
        await goes_on.wait()
        return Answer.error(400)

    d.script = [slow]
    turns = [asyncio.create_task(router.client.chat()) for _ in range(3)]
    while not d.seen:
        await asyncio.sleep(0)
    await router.client.get("/metrics")
    assert router.count("waiting") == 2 and router.count("in_flight") == 3
    busy = [router.count("engine_in_flight", engine="engine-1", rank=rank) for rank in "01"]
    assert sorted(busy) == [0, 1] and router.count("engine_in_flight", engine="engine-0", rank="0") == 0
    goes_on.set()
    await asyncio.gather(*turns)
    d.reachable = False
    await router.app.membership.look_at_all()
    await router.client.get("/metrics")
    states = ("ready", "suspect", "down", "quarantined")
    assert [router.count("engine_state", engine="engine-0", state=state) for state in states] == [1, 0, 0, 0]
    assert [router.count("engine_state", engine="engine-1", state=state) for state in states] == [0, 0, 1, 0]
    assert router.count("waiting") == router.count("engine_in_flight", engine="engine-1", rank="0") == 0


ABOUT = ("x-schedloom-decision", "x-schedloom-decoder")


async def test_every_request_has_a_line_where_all_is_logged(bench: Make, caplog: pytest.LogCaptureFixture) -> None:
    for level, lines in (("INFO", 0), ("DEBUG", 2)):
        caplog.set_level(level)
        router = await bench(prefiller(), decoder())
        received = await router.client.chat()
        mistaken = await router.client.post("/v1/completions", b"{")
        told = [record.getMessage() for record in caplog.records if record.name == "schedloom.router.endpoint"]
        assert len(told) == lines
    served, refused = told
    assert "/v1/chat/completions: served with status 200 by route pd and engine-1 in " in served
    assert served.endswith(f" ms, request {received.headers['x-request-id']}")
    assert "/v1/completions: refused with status 400 by route none and no Decoder in " in refused
    assert refused.endswith(f" ms, request {mistaken.headers['x-request-id']}")


async def test_an_error_of_the_routers_own_has_an_id_and_no_route(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    router.renew(p, d, drain=d)
    answers = [
        await router.client.post("/v1/completions", b"{"),
        await router.client.post("/v1/completions", b"{"),
        await router.client.chat(),
        await router.client.get("/nowhere"),
        await router.client.post("/health", b""),
    ]
    assert [answer.status for answer in answers] == [400, 400, 503, 404, 405]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == len(answers) and {len(one) for one in ids} == {32}
    assert all(header not in answer.headers for answer in answers for header in ABOUT)


class Planner(Policy):
    name = "planner"
    plan: Any = None

    @hookimpl
    def plan_route(self, request: Any, owner: Any, fleet: Any) -> Any:
        return type(self).plan(request, owner, fleet)


@pytest.fixture
def planned(bench: Make, monkeypatch: pytest.MonkeyPatch) -> Any:
    async def make(plan: Any, *engines: Any, **settings: Any) -> Bench:
        from schedloom.core import composition
        from schedloom.router import app

        monkeypatch.setattr(Planner, "plan", staticmethod(plan))

        def compose(choices: Any, registry: Any, side: Any) -> Any:
            return composition.PolicySet((), {"plan_route": (composition.Hook("planner", Planner().plan_route),)})

        monkeypatch.setattr(app, "compose", compose)
        return await bench(*engines, **settings)

    return make


async def test_the_cheapest_plan_is_taken(planned: Any) -> None:
    plan = [Attempt(Route.APPEND, "engine-2", 0, 2.0), Attempt(Route.DECODE, "engine-1", None, 1.0)]
    router = await planned(lambda *_: plan, prefiller(), decoder(0), decoder(1))
    for _ in range(3):
        received = await router.client.chat("s")
        assert (received.decision, received.headers["x-schedloom-decoder"]) == ("decode", "engine-1")


async def test_a_plan_may_pin_the_decoder_of_an_ordinary_request(planned: Any) -> None:
    plan = [Attempt(Route.PREFILL_DECODE, "engine-2")]
    router = await planned(lambda *_: plan, prefiller(), decoder(0), decoder(1))
    for _ in range(3):
        received = await router.client.chat("s")
        assert (received.decision, received.headers["x-schedloom-decoder"]) == ("pd", "engine-2")


@pytest.mark.parametrize(
    "attempt",
    [
        Attempt(Route.APPEND, "nobody", 0),
        Attempt(Route.APPEND, "engine-0", 0),
        Attempt(Route.APPEND, "engine-1", 7),
        Attempt(Route.APPEND),
        Attempt(Route.DECODE, "engine-0"),
        Attempt(Route.PREFILL_DECODE, "engine-0"),
    ],
)
async def test_an_impossible_plan_is_passed_over(planned: Any, attempt: Attempt) -> None:
    router = await planned(lambda *_: [attempt], prefiller(), decoder())
    received = await router.client.chat("s")
    assert (received.status, received.decision) == (200, "pd")


async def test_a_decoder_that_cannot_turn_away_gets_no_local_attempt(planned: Any) -> None:
    attempt = Attempt(Route.APPEND, "engine-1", 0)
    unfit: list[dict[str, Any]] = [{"features": []}, {"prefix_caching": False}]
    for changes in unfit:
        d = decoder(**changes)
        router = await planned(lambda *_: [attempt], prefiller(), d, append=False)
        assert (await router.client.chat("s")).decision == "pd"
        assert not any(seen.is_local_attempt for seen in d.seen)


async def test_policies_are_told_of_owners_that_live(planned: Any) -> None:
    told: list[SessionOwner | None] = []

    def plan(_: Any, owner: SessionOwner | None, fleet: Any) -> None:
        told.append(owner)

    d = decoder(data_parallel_size=2)
    router = await planned(plan, prefiller(), d)
    await router.client.chat("s")
    await router.client.chat("s")
    d.contract = contract(Role.CONSUMER, epoch="e2", data_parallel_size=2)
    await router.app.membership.look_at_all()
    await router.client.chat("s")
    await router.client.chat()
    first, again, restarted, without = told
    assert first is restarted is without is None
    assert again is not None and (again.worker, again.epoch) == ("engine-1", "e1")


def _raising() -> None:
    raise ValueError("no idea")


@pytest.mark.parametrize(
    "plan",
    [
        _raising,
        lambda: ["append"],
        lambda: Attempt(Route.APPEND, "engine-1"),
        lambda: [Attempt("append", "engine-1")],  # type: ignore[arg-type]
        lambda: [Attempt(Route.APPEND, ["engine-1"])],  # type: ignore[arg-type]
        lambda: [Attempt(Route.APPEND, "engine-1", "0")],  # type: ignore[arg-type]
        lambda: [Attempt(Route.APPEND, "engine-1", 0, None)],  # type: ignore[arg-type]
        lambda: [Attempt(Route.APPEND, "engine-1", 0, float("nan"))],
    ],
    ids=["raises", "a word", "no list", "no route", "no name", "no rank", "no cost", "a cost that is no number"],
)
async def test_a_policy_that_raises_or_plans_nonsense_is_passed_over_and_counted(
    planned: Any, plan: Callable[[], Any]
) -> None:

    router = await planned(lambda *_: plan(), prefiller(), decoder())
    for _ in range(2):
        assert (await router.client.chat("s")).decision == "pd"
    assert router.count("policy_errors_total", policy="planner") == 2
