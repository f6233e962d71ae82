"""B1, B7, C1: which engine and rank serves a part of a request, with policies and without, and what policies learn."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import pytest

from schedloom import Policy, hookimpl
from schedloom.core.composition import PolicyChoice, PolicySet, compose
from schedloom.core.policy import ScoreSettings
from schedloom.core.routing import AttemptReport, Candidate, Ending, Leg, Question
from schedloom.core.wire import Role
from schedloom.router.events.none import NobodyTells
from schedloom.router.failures import Failure
from schedloom.router.fleet.fleet import Doubt, Fleet
from schedloom.router.fleet.worker import Health, Worker
from schedloom.router.learning import Lessons
from schedloom.router.requests.call import Call, read_call
from schedloom.router.requests.headers import ClientHeaders
from schedloom.router.selection import Excuses, Selection, View
from schedloom.router.settings import WorkerSettings
from schedloom.router.telemetry.metrics import Metrics
from tests.core.fakes import FakeRegistry
from tests.router.conftest import Bench, Make
from tests.router.fakes import Answer, contract, decoder, prefiller

pytestmark = pytest.mark.anyio


class Named(Policy):
    """Prefers, or leaves out, engines by their names."""

    Settings = ScoreSettings
    keeps: Sequence[str] | None = None
    scores: Sequence[float] | None = None

    @hookimpl
    def filter_workers(self, leg: Leg, candidates: Sequence[Candidate]) -> list[Candidate] | None:
        return None if self.keeps is None else [one for one in candidates if one.name in self.keeps]

    @hookimpl
    def score_workers(self, candidates: Sequence[Candidate]) -> Sequence[float] | None:
        return self.scores


class Raises(Policy):
    name = "raises"

    @hookimpl
    def filter_workers(self) -> None:
        raise RuntimeError("on purpose")

    @hookimpl
    def score_workers(self) -> None:
        raise RuntimeError("on purpose")

    @hookimpl
    def attempt_finished(self) -> None:
        raise RuntimeError("on purpose")


class Spoils(Policy):
    """Takes out of the list that it is given what it does not want."""

    name = "spoils"
    Settings = ScoreSettings

    @hookimpl
    def filter_workers(self, candidates: Any) -> Any:
        candidates.clear()
        return candidates

    @hookimpl
    def score_workers(self, candidates: Any) -> Any:
        candidates.pop()
        return [1.0 for _ in candidates]


class Writes(Policy):
    """Writes down how attempts ended."""

    name = "writes"

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self.reports: list[AttemptReport] = []

    @hookimpl
    def attempt_finished(self, report: AttemptReport) -> None:
        self.reports.append(report)


def named(name: str, keeps: Sequence[str] | None = None, scores: Sequence[float] | None = None) -> type[Policy]:
    return type(name, (Named,), {"name": name, "keeps": keeps, "scores": scores})


def policies(*classes: type[Policy], **weights: float) -> PolicySet:
    registry = FakeRegistry({policy.name: policy for policy in classes})
    choices: list[dict[str, Any]] = [
        {"name": one.name} | ({"weight": weights[one.name]} if one.name in weights else {}) for one in classes
    ]
    return compose([PolicyChoice.model_validate(choice) for choice in choices], registry, side="router")


def decoders(*names: str, **changes: Any) -> Fleet:
    workers = [Worker(name, WorkerSettings(url=f"http://{name}:1")) for name in names]
    for worker in workers:
        worker.join(contract(Role.CONSUMER, **changes))
    return Fleet(workers)


def selection(fleet: Fleet, chosen: PolicySet, metrics: Metrics | None = None) -> Selection:
    view = View(lambda: 0.0, NobodyTells(), random.Random(0))
    return Selection(fleet, chosen, Excuses(metrics or Metrics()), view)


def call(**body: Any) -> Call:
    raw = json.dumps({"model": "m", "prompt": "hello"} | body).encode()
    return read_call("/v1/completions", ClientHeaders([]), raw)


def picks(fleet: Fleet, *classes: type[Policy], n: int = 6, **weights: float) -> list[str]:
    select = selection(fleet, policies(*classes, **weights))
    return [select.decoder(call()).name for _ in range(n)]


def test_without_an_opinion_the_least_busy_is_chosen_and_equals_take_turns() -> None:
    fleet = decoders("a", "b", "c")
    with fleet.workers[0].serving(0):
        for classes in ([], [named("silent")]):
            assert Counter(picks(fleet, *classes)) == {"b": 3, "c": 3}


def test_a_policy_cannot_spoil_what_others_choose_from() -> None:
    assert Counter(picks(decoders("a", "b"), Spoils)) == {"a": 3, "b": 3}


def test_the_highest_sum_wins_and_weights_count() -> None:
    one, other = named("one", scores=[1.0, 0.0, 0.5]), named("other", scores=[0.0, 0.9, 0.8])
    assert set(picks(decoders("a", "b", "c"), one, other)) == {"c"}
    assert set(picks(decoders("a", "b", "c"), one, other, one=2.0)) == {"a"}
    assert set(picks(decoders("a", "b", "c"), one, other, other=9.0)) == {"b"}


def test_sums_that_differ_by_rounding_alone_are_equal() -> None:
    tenths = [named(f"p{number}", scores=[0.1, 1.0 if number == 0 else 0.0]) for number in range(10)]
    assert Counter(picks(decoders("a", "b"), *tenths)) == {"a": 3, "b": 3}


def test_filters_narrow_in_the_order_of_names() -> None:
    fleet = decoders("a", "b", "c")
    assert set(picks(fleet, named("one", keeps="ab"), named("two", keeps="bc"))) == {"b"}


def test_a_filter_that_would_leave_nobody_is_passed_over() -> None:
    fleet = decoders("a", "b", "c")
    assert set(picks(fleet, named("one", keeps="a"), named("two", keeps="bc"))) == {"a"}
    assert set(picks(fleet, named("one", keeps=""))) == {"a", "b", "c"}


def test_each_rank_is_a_candidate() -> None:
    fleet = decoders("a", "b", data_parallel_size=2)
    select = selection(fleet, policies(named("one", scores=[0, 0, 0, 1])))
    target = select.decoder(call())
    assert (target.name, target.rank, target.owner.rank) == ("b", 1, 1)


def test_ranks_may_differ_in_number_and_each_is_balanced() -> None:
    fleet = decoders("a", "b")
    fleet.workers[1].join(contract(Role.CONSUMER, epoch="e2", data_parallel_size=3))
    select = selection(fleet, policies(named("silent")))
    taken = [select.decoder(call()) for _ in range(8)]
    assert Counter((one.name, one.rank) for one in taken) == {("a", 0): 2, ("b", 0): 2, ("b", 1): 2, ("b", 2): 2}


def test_who_is_avoided_suspect_or_full_is_no_candidate_while_others_are_there() -> None:
    fleet = decoders("a", "b", "c")
    a, b, c = fleet.workers
    select = selection(fleet, policies(named("one", scores=[1.0, 0.0])))
    a.is_full_for(60)
    assert select.decoder(call()) is b.targets[0]
    assert select.decoder(call(), {b: Doubt.FAILED}) is c.targets[0]
    b.suspect()
    c.leave(Health.DOWN, "gone")
    assert select.decoder(call()) is a.targets[0]
    for worker in (a, b):
        worker.leave(Health.DOWN, "gone")
    with pytest.raises(Failure):
        select.decoder(call())


@pytest.mark.parametrize("scores", [[1.0], [1.0, 2.0], [float("nan"), 0.0], ["high", 0.0], [-0.1, 0.0]])
def test_scores_that_make_no_sense_are_passed_over(scores: Any) -> None:
    metrics = Metrics()
    select = selection(decoders("a", "b"), policies(named("odd", scores=scores)), metrics)
    assert Counter(select.decoder(call()).name for _ in range(4)) == {"a": 2, "b": 2}
    assert metrics.registry.get_sample_value("schedloom_router_policy_errors_total", {"policy": "odd"}) == 4


def test_a_policy_that_raises_is_passed_over_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics, fleet = Metrics(), decoders("a", "b")
    chosen = policies(Raises, named("zones", keeps="b"))
    select = selection(fleet, chosen, metrics)
    assert {select.decoder(call()).name for _ in range(3)} == {"b"}
    assert select.permits(call(), fleet.workers[1].targets[0])
    assert metrics.registry.get_sample_value("schedloom_router_policy_errors_total", {"policy": "raises"}) == 4
    assert len(caplog.records) == 1
    fleet.workers[1].leave(Health.DOWN, "gone")
    fleet.workers[0].join(contract(Role.CONSUMER, data_parallel_size=2))
    select.decoder(call())
    assert len(caplog.records) == 2


def test_load_is_counted_in_requests_and_bytes_per_rank() -> None:
    (worker,) = decoders("a", data_parallel_size=2).workers
    first, second = worker.targets
    with worker.serving(1, 100), worker.serving(1, 50):
        assert (second.in_flight, second.in_flight_bytes) == (2, 150)
        assert (first.in_flight, first.in_flight_bytes) == (0, 0)
    assert (second.in_flight, second.in_flight_bytes) == (0, 0)


def test_a_candidate_is_the_same_object_for_one_life() -> None:
    (worker,) = decoders("a").workers
    before = worker.targets[0]
    worker.join(contract(Role.CONSUMER))
    assert worker.targets[0] is before
    worker.join(contract(Role.CONSUMER, epoch="e2"))
    assert worker.targets[0] is not before


def test_prompts_with_a_common_beginning_have_common_blocks() -> None:
    system = {"role": "system", "content": "s" * 5000}
    turns = [[system, {"role": "user", "content": "hello"}]]
    turns.append([*turns[0], {"role": "assistant", "content": "hi"}, {"role": "user", "content": "u" * 5000}])
    one, other, apart = (
        call(messages=messages, tools=[{"type": "function"}]).prefix_blocks
        for messages in (*turns, [{"role": "user", "content": "hello"}, system])
    )
    assert len(one) == 5 and other[: len(one)] == one and len(other) > len(one)
    assert set(apart).isdisjoint(other)


def test_blocks_stand_for_one_prompt_of_one_model_and_salt() -> None:
    """SEC-14."""
    (block, _) = Question("m", cache_salt="s", prompt=b"p" * 2048).prefix_blocks
    assert block == sha256(b"('m', 's')" + b"p" * 1024).digest()
    others = [Question("m2", cache_salt="s", prompt=b"p" * 1024), Question("m", prompt=b"p" * 1024)]
    others += [Question("m", cache_salt="s", prompt=b"p" * 1023 + b"q"), Question("m', 's", prompt=b"p" * 1024)]
    assert len({block, *(one.prefix_blocks[0] for one in others)}) == 5


async def watched(bench: Make, *engines: Any, **settings: Any) -> tuple[Bench, Writes]:
    router = await bench(*engines, **settings)
    chosen, metrics = policies(Writes), router.app.metrics
    (writes,) = chosen.policies
    assert isinstance(writes, Writes)
    view = View(lambda: 0.0, NobodyTells(), random.Random(0))
    router.app._attempts._dispatcher._lessons = Lessons(chosen, Excuses(metrics), view)
    return router, writes


async def test_every_attempt_is_told_with_what_it_says_of_tokens(bench: Make) -> None:
    router, writes = await watched(bench, prefiller(), decoder())
    await router.client.chat("s")
    await router.client.chat("s", stream=True, stream_options={"include_usage": True})
    told = [(one.leg, one.ending, one.prompt_tokens, one.output_tokens) for one in writes.reports]
    assert told == [
        (Leg.PREFILL, Ending.ANSWERED, 7, 1),
        (Leg.DECODE, Ending.ANSWERED, 7, 3),
        (Leg.APPEND, Ending.ANSWERED, 7, 3),
    ]
    assert all(one.first_byte is not None and one.first_byte <= one.seconds for one in writes.reports)


@pytest.mark.parametrize(
    ("answer", "ending"),
    [(Answer.error(400), Ending.LEFT), (Answer.error(500), Ending.FAILED), (Answer.error(503), Ending.FULL)],
)
async def test_how_an_attempt_ended_is_told(bench: Make, answer: Answer, ending: Ending) -> None:
    p = prefiller()
    router, writes = await watched(bench, p, decoder())
    p.script = [answer]
    await router.client.chat()
    assert writes.reports[0].ending is ending


async def test_hints_reach_policies_and_no_engine(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    headers = {"x-schedloom-ttft-slo-ms": " 500 ", "x-schedloom-decision": "append"}
    await router.client.post("/v1/completions", {"model": "fake-model", "prompt": "a"}, headers)
    assert not any(name.startswith("x-schedloom") for engine in (p, d) for name in engine.seen[0].headers)
    parsed = ClientHeaders([(name.encode(), value.encode()) for name, value in headers.items()])
    assert parsed.hints["ttft-slo-ms"] == "500"


async def test_the_built_in_policies_serve_together(bench: Make) -> None:
    chosen = [{"name": name} for name in ("least_tokens", "prefix_aware", "ttft_slo")]
    engines = [prefiller(0), prefiller(1), decoder(0), decoder(1)]
    router = await bench(*engines, policies=chosen)
    prompt = "p" * 4000
    for _ in range(4):
        assert (await router.client.post("/v1/completions", {"model": "fake-model", "prompt": prompt})).status == 200
    seen = [len(engine.seen) for engine in engines]
    assert sorted(seen[:2]) == [0, 4] and sorted(seen[2:]) == [0, 4]
    assert router.count("policy_errors_total", policy="prefix_aware") == 0
