"""Second tries: where they help, never after output, and never without bound."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

from schedloom.router.fleet.breaker import CONSECUTIVE_FAILURES
from schedloom.router.http.upstream import BrokenOff, ConnectFailed
from tests.router.conftest import Make
from tests.router.fakes import BROKEN, EVENTS, Answer, FakeEngine, Seen, decoder, event_bytes, prefiller
from tests.router.waiting import in_one_of

pytestmark = pytest.mark.anyio

WORD = {"id": "x", "choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]}
TROUBLES = [
    Answer.error(500),
    Answer.error(503),
    Answer.error(429),
    Answer(200, b"application/json", [ConnectFailed("refused")]),
    Answer(200, b"application/json", [BrokenOff("lost")]),
]


def fresh(answer: Answer) -> Answer:
    return Answer(answer.status, answer.kind, list(answer.steps), answer.headers)


def engines() -> tuple[list[FakeEngine], list[FakeEngine]]:
    return [prefiller(0), prefiller(1)], [decoder(0), decoder(1)]


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("stream", [False, True])
async def test_another_prefiller_is_tried(bench: Make, trouble: Answer, stream: bool) -> None:
    prefillers, decoders = engines()
    router = await bench(*prefillers, *decoders)
    prefillers[0].always = fresh(trouble)
    received = await router.client.chat("s", stream=stream)
    assert (received.status, received.decision, received.text) == (200, "pd", " word word word")
    assert [len(engine.seen) for engine in prefillers] == [1, 1]
    assert sum(len(engine.seen) for engine in decoders) == 1
    assert router.count("retries_total") == 1


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("stream", [False, True])
async def test_another_decoder_is_tried_with_a_fresh_prefill(bench: Make, trouble: Answer, stream: bool) -> None:
    prefillers, decoders = engines()
    router = await bench(*prefillers, *decoders)
    decoders[0].always = fresh(trouble)
    received = await router.client.chat("s", stream=stream)
    assert (received.status, received.text) == (200, " word word word")
    assert [len(engine.seen) for engine in decoders] == [1, 1]
    ids = [seen.headers["x-request-id"] for engine in prefillers for seen in engine.seen]
    assert len(set(ids)) == 2
    assert decoders[1].seen[0].headers["x-request-id"] == ids[1] or decoders[1].seen[0].headers["x-request-id"] in ids


@pytest.mark.parametrize("role", [0, 1])
async def test_the_failure_that_has_an_engine_left_out_is_tried_again_too(bench: Make, role: int) -> None:
    pools = engines()
    router = await bench(*pools[0], *pools[1])
    for _ in range(30):
        await router.client.chat()
    bad = pools[role][0]
    bad.seen.clear()
    bad.always = Answer.error(500)
    assert {(await router.client.chat()).status for _ in range(30)} == {200}
    assert len(bad.seen) == CONSECUTIVE_FAILURES


@pytest.mark.parametrize("role", [0, 1])
async def test_what_an_engine_broke_off_is_tried_again_when_it_is_down_by_then(bench: Make, role: int) -> None:
    pools = engines()
    router = await bench(*pools[0], *pools[1])

    async def die(seen: Seen) -> Answer:
        pools[role][0].reachable = False
        await router.app.membership.look_at_all()
        return Answer(200, b"application/json", [BROKEN])

    pools[role][0].script = [die]
    assert (await router.client.chat()).status == 200


async def test_an_error_event_before_output_counts_as_an_error(bench: Make) -> None:
    prefillers, decoders = engines()
    router = await bench(*prefillers, *decoders)
    decoders[0].always = Answer.stream({"error": {"message": "kv load failed", "code": 500}}, "[DONE]")
    received = await router.client.chat("s", stream=True)
    assert (received.status, received.text) == (200, " word word word")


async def test_a_second_failure_is_the_answer(bench: Make) -> None:
    prefillers, decoders = engines()
    router = await bench(*prefillers, *decoders)
    for engine in decoders:
        engine.always = Answer.error(500, engine.origin)
    received = await router.client.chat("s")
    assert received.status == 500
    assert sum(len(engine.seen) for engine in prefillers + decoders) == 4


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_a_clients_error_is_not_tried_again(bench: Make, status: int) -> None:
    prefillers, decoders = engines()
    router = await bench(*prefillers, *decoders)
    for pool in (prefillers, decoders):
        for engine in pool:
            engine.script = [Answer.error(status)]
        assert (await router.client.chat()).status == status
        for engine in pool:
            engine.script = []
    assert router.count("retries_total") == 0


async def test_nothing_is_tried_again_after_output(bench: Make) -> None:
    prefillers, decoders = engines()
    router = await bench(*prefillers, *decoders)
    for engine in decoders:
        engine.script = [Answer(200, EVENTS, [event_bytes(WORD), BROKEN])]
    received = await router.client.chat("s", stream=True)
    assert "error" in received.objects[-1]
    assert sum(len(engine.seen) for engine in decoders) == 1


@pytest.mark.parametrize("count", [2, 5])
async def test_work_per_request_is_bounded_however_many_engines_there_are(bench: Make, count: int) -> None:
    """A local attempt that fails, and two passes that fail: five dispatches, then an error."""
    prefillers, decoders = [prefiller(number) for number in range(count)], [decoder(number) for number in range(count)]
    router = await bench(*prefillers, *decoders)
    await router.client.chat("s")
    for engine in prefillers + decoders:
        engine.seen.clear()
    for engine in decoders:
        engine.always = Answer.error(500)
    assert (await router.client.chat("s")).status == 500
    assert sum(len(engine.seen) for engine in prefillers + decoders) == 5


async def test_after_a_failed_local_attempt_another_decoder_serves(bench: Make) -> None:
    p, decoders = prefiller(), [decoder(0), decoder(1)]
    router = await bench(p, *decoders)
    await router.client.chat("s")
    owner = next(engine for engine in decoders if engine.seen)
    owner.always = Answer.error(500)
    (other,) = [one for one in router.app.fleet.decoders if one.origin != owner.origin]
    with other.serving(0):
        received = await router.client.chat("s")
    assert (received.status, received.decision) == (200, "fallback")
    assert len(owner.seen) == 2
    assert router.count("retries_total") == 0


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("failing", [[0], [1], [0, 1]])
async def test_second_tries_do_not_become_a_storm(bench: Make, failing: list[int], whole: bool) -> None:
    pools = engines()
    router = await bench(*pools[0], *pools[1])
    for engine in (engine for role in failing for engine in pools[role]):
        engine.always = Answer.error(500)
    status = 200 if whole and 1 not in failing else 500
    for _ in range(1000):
        assert (await router.client.chat(n=2 if whole else 1)).status == status
    for pool in pools:
        assert sum(len(engine.seen) for engine in pool) <= 1000 + 200 + 3, "a fifth, and three while that is less"


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_what_one_decoder_does_alone_is_tried_on_another(bench: Make, trouble: Answer) -> None:
    p, decoders = prefiller(), [decoder(0), decoder(1)]
    router = await bench(p, *decoders)
    decoders[0].always = fresh(trouble)
    assert {(await router.client.chat(n=2)).status for _ in range(3)} == {200}
    assert p.seen == [] and router.count("retries_total") > 0


async def test_a_decoder_alone_is_asked_once(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    d.always = Answer.error(500)
    assert (await router.client.chat(n=2)).status == 500
    assert len(d.seen) == 1


async def test_a_decoder_that_fails_for_what_its_prefiller_gave_it_is_served_by_another(bench: Make) -> None:
    (bad, good), d = engines()[0], decoder()
    router = await bench(bad, good, d)

    async def cannot_read(seen: Seen) -> Answer:
        return Answer.error(500, "kv load failed")

    d.script = [cannot_read]
    assert (await router.client.chat()).status == 200
    assert [len(bad.seen), len(good.seen), len(d.seen)] == [1, 1, 2]


async def test_where_no_decoder_is_left_to_try_nothing_is_prefilled_again(bench: Make) -> None:
    prefillers, d = engines()[0], decoder()
    router = await bench(*prefillers, d)
    d.always = Answer.error(503)
    assert (await router.client.chat()).status == 503
    assert sum(len(engine.seen) for engine in prefillers) == 1


async def test_when_one_of_each_fails_at_once_five_dispatches_do(bench: Make) -> None:
    """The Prefiller, another, its Decoder, and once more where the prompt was computed already, for another Decoder."""
    prefillers, decoders = engines()
    router = await bench(*prefillers, *decoders)
    prefillers[0].always, decoders[0].always = Answer.error(500), Answer.error(500)
    assert (await router.client.chat()).status == 200
    assert [len(engine.seen) for engine in prefillers + decoders] == [1, 2, 1, 1]


@pytest.mark.parametrize("trouble", [Answer.error(503), Answer(200, b"application/json", [ConnectFailed("refused")])])
async def test_after_a_decoder_that_took_nothing_up_its_prefiller_is_asked_again(bench: Make, trouble: Answer) -> None:
    """So that five dispatches reach, for a turn that its owner turned away too, when one of each stops at once."""
    prefillers, decoders = engines()
    router = await bench(*prefillers, *decoders)
    decoders[0].always = fresh(trouble)
    assert (await router.client.chat()).status == 200
    assert [len(engine.seen) for engine in prefillers + decoders] == [2, 0, 1, 1]


@pytest.mark.parametrize("trouble", [Answer.error(500), Answer(200, b"application/json", [BROKEN])])
async def test_a_failing_decoder_is_soon_left_out(bench: Make, trouble: Answer) -> None:
    p, decoders = prefiller(), [decoder(0), decoder(1)]
    router = await bench(p, *decoders)
    decoders[0].always = trouble
    statuses = []
    for _ in range(40):
        statuses.append((await router.client.chat()).status)
        await router.app.membership.look_at_all()
    assert len(decoders[0].seen) == 5
    assert len([status for status in statuses if status >= 500]) == 2 and statuses[20:] == [200] * 20


async def test_a_full_prefiller_is_spared(bench: Make) -> None:
    prefillers, decoders = engines()
    router = await bench(*prefillers, *decoders)
    prefillers[0].script = [Answer.error(503, headers=[(b"retry-after", b"30")])]
    for _ in range(10):
        assert (await router.client.chat()).status == 200
    assert len(prefillers[0].seen) == 1


async def test_a_busy_owner_does_not_keep_its_session(bench: Make) -> None:
    p, decoders = prefiller(), [decoder(0), decoder(1)]
    router = await bench(p, *decoders, policies=[{"name": "session_owner", "max_lead": 2}])
    first = await router.client.chat("s")
    owner = next(engine for engine in decoders if engine.seen)
    (worker,) = [one for one in router.app.fleet.workers if one.origin == owner.origin]
    with worker.serving(0), worker.serving(0):
        assert (await router.client.chat("s")).decision == "append"
        with worker.serving(0):
            moved = await router.client.chat("s")
            assert moved.decision == "pd"
            assert moved.headers["x-schedloom-decoder"] != first.headers["x-schedloom-decoder"]
            again = await router.client.chat("s")
    assert again.decision == "append"
    assert again.headers["x-schedloom-decoder"] == moved.headers["x-schedloom-decoder"]


@pytest.mark.parametrize("begun", [False, True])
@in_one_of(5)
async def test_a_request_that_takes_too_long_ends_in_an_error(bench: Make, begun: bool) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d, request_timeout_seconds=0.05)
    never = asyncio.Event()
    d.script = [Answer(200, EVENTS, [*([event_bytes(WORD)] if begun else []), never])]
    received = await router.client.chat("s", stream=True)
    assert received.ended and d.cancelled == 1
    if begun:
        assert received.objects[-1]["error"]["code"] == "request_timeout"
    else:
        assert (received.status, received.json["error"]["code"]) == (504, "request_timeout")


@in_one_of(5)
async def test_a_deadline_that_comes_after_the_end_changes_nothing(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d, request_timeout_seconds=0.05)
    finish = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    d.script = [Answer(200, EVENTS, [*map(event_bytes, [WORD, finish, "[DONE]"]), asyncio.Event()])]
    received = await router.client.chat("s", stream=True)
    assert received.ended and received.events[-1] == "[DONE]"
    assert router.count("requests_total", route="pd", outcome="served") == 1


TOLD_AGAIN = re.compile(r"request (\w{32}) is tried again as (\w{32})").fullmatch


def ways_on(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[tuple[str, ...]]:
    """Which attempt went on as which, by what was logged."""
    found = (TOLD_AGAIN(record.getMessage()) for record in caplog.records if record.levelno == level)
    return [match.groups() for match in found if match]


@pytest.mark.parametrize(("role", "n"), [(0, 1), (1, 1), (1, 2)])
@pytest.mark.parametrize(
    ("trouble", "level"),
    [(Answer(200, b"application/json", [BROKEN]), logging.WARNING), (Answer.error(503), logging.DEBUG)],
)
async def test_a_second_try_is_told_by_both_ids(
    bench: Make, role: int, n: int, trouble: Answer, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As loud as the trouble itself was told."""
    caplog.set_level(logging.DEBUG, "schedloom.router")
    pools = engines()
    router = await bench(*pools[0], *pools[1])
    pools[role][0].script = [fresh(trouble)]
    first, second = [(await router.client.chat(n=n)).headers["x-request-id"] for _ in range(2)]
    seen = [seen.headers["x-request-id"] for seen in pools[role][0].seen]
    assert ways_on(caplog, level) == [(seen[0], first)] and len({seen[0], first, second}) == 3
    assert len(ways_on(caplog, logging.WARNING) + ways_on(caplog, logging.DEBUG)) == 1


async def test_what_goes_on_after_a_local_attempt_or_a_late_hand_over_is_told_by_both_ids(
    bench: Make, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    await router.client.chat("s")
    d.holds = False
    assert (await router.client.chat("s")).decision == "fallback" and not ways_on(caplog)
    d.holds, d.script = True, [Answer(200, b"application/json", [BROKEN])]
    answer = await router.client.chat("s")
    assert answer.decision == "fallback"
    assert ways_on(caplog) == [(d.seen[-2].headers["x-request-id"], answer.headers["x-request-id"])]
    caplog.clear()
    router.upstream.too_late = 1
    answer = await router.client.chat("t")
    assert ways_on(caplog) == [(p.seen[-2].headers["x-request-id"], answer.headers["x-request-id"])]
