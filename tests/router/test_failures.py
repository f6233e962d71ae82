"""What clients see when engines fail, in every phase of a request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from schedloom.core.wire import Role
from schedloom.router.fleet.worker import Health
from schedloom.router.http.upstream import BrokenOff, ConnectFailed, TimedOut
from tests.router.conftest import Bench, Make
from tests.router.fakes import (
    BROKEN,
    EVENTS,
    Answer,
    FakeEngine,
    Seen,
    contract,
    decoder,
    event_bytes,
    prefiller,
)
from tests.router.waiting import until

pytestmark = pytest.mark.anyio

STREAMS = pytest.mark.parametrize("stream", [False, True])
WORD = {"id": "x", "choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]}
ROLE = {
    "id": "x",
    "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
}
ERROR = {"error": {"message": "engine trouble", "type": "InternalServerError", "param": None, "code": 500}}


async def with_owner(bench: Make) -> tuple[Bench, FakeEngine, FakeEngine]:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    assert (await router.client.chat("s")).decision == "pd"
    return router, p, d


@STREAMS
@pytest.mark.parametrize("status", [400, 404, 408, 422, 429, 500, 503, 504])
async def test_a_prefillers_error_keeps_its_status_and_body(bench: Make, stream: bool, status: int) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    p.script = [Answer.error(status, "prefiller says no", headers=[(b"retry-after", b"7")])]
    received = await router.client.chat("s", stream=stream)
    assert received.status == status
    assert received.json["error"]["message"] == "prefiller says no"
    assert received.headers["retry-after"] == "7"
    assert d.seen == []
    assert len(router.sessions) == 0


@STREAMS
@pytest.mark.parametrize("status", [400, 408, 422, 429, 500, 503, 504])
async def test_a_decoders_error_keeps_its_status_and_body(bench: Make, stream: bool, status: int) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    d.script = [Answer.error(status, "decoder says no")]
    received = await router.client.chat("s", stream=stream)
    assert (received.status, received.json["error"]["message"]) == (status, "decoder says no")
    assert received.headers["content-type"] == "application/json"
    assert len(router.sessions) == 0


@STREAMS
@pytest.mark.parametrize("status", [400, 404, 429, 503])
async def test_what_a_prefiller_refuses_tells_its_route_and_request(bench: Make, stream: bool, status: int) -> None:
    router, p, d = await with_owner(bench)
    d.holds = False
    for session, route in ((None, "pd"), ("s", "fallback")):
        p.script = [Answer.error(status)]
        received = await router.client.chat(session, stream=stream)
        assert (received.status, received.decision) == (status, route)
        assert received.headers["x-request-id"] == p.seen[-1].headers["x-request-id"]
        assert "x-schedloom-decoder" not in received.headers
        outcome = "refused" if status < 500 else "failed"
        assert router.count("requests_total", route=route, outcome=outcome) == 1


@STREAMS
@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("key", [None, "engine-key"])
@pytest.mark.parametrize("failing", [0, 1])
async def test_an_engine_that_refuses_the_routers_key_is_no_fault_of_the_client(
    bench: Make, stream: bool, status: int, key: str | None, failing: int, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [prefiller(), decoder()]
    router = await bench(*engines, engine_api_key=key)
    engines[failing].always = Answer.of({"error": "Unauthorized"}, status)
    for _ in range(3):
        received = await router.client.chat("s", stream=stream)
        assert (received.status, received.json["error"]["code"]) == (502, "engine_refused_key")
        assert ("Prefiller", "Decoder")[failing] in received.json["error"]["message"]
        assert received.decision == "pd" and "engine-key" not in received.body.decode()
    (told,) = [record.getMessage() for record in caplog.records if "engine_api_key" in record.getMessage()]
    assert told.startswith(f"engine-{failing} refuses ") and "engine-key" not in told
    assert ("without a key" in told) == (key is None)
    assert router.count("requests_total", route="pd", outcome="failed") == 3


@pytest.mark.parametrize("failing", [0, 2])
async def test_another_engine_may_take_the_key_that_one_refuses(bench: Make, failing: int) -> None:
    engines = [prefiller(0), prefiller(1), decoder(0), decoder(1)]
    engines[failing].always = Answer.of({"error": "Unauthorized"}, 401)
    router = await bench(*engines)
    for _ in range(3):
        assert (await router.client.chat()).status == 200


@pytest.mark.parametrize("failing", [0, 1])
async def test_a_key_of_the_clients_own_is_refused_to_the_client(bench: Make, failing: int) -> None:
    engines = [prefiller(), decoder()]
    router = await bench(*engines, forward_authorization=True)
    engines[failing].always = Answer.of({"error": "Unauthorized"}, 401)
    received = await router.client.chat("s")
    assert (received.status, received.json) == (401, {"error": "Unauthorized"})


@STREAMS
@pytest.mark.parametrize("status", [201, 204, 302, 304, 600])
@pytest.mark.parametrize("failing", [0, 1])
async def test_what_is_neither_output_nor_an_error_is_a_clear_error(
    bench: Make, stream: bool, status: int, failing: int
) -> None:
    engines = [prefiller(), decoder()]
    router = await bench(*engines)
    engines[failing].script = [Answer(status, b"text/html", [b"elsewhere"], [(b"location", b"http://10.0.0.7")])]
    received = await router.client.chat("s", stream=stream)
    assert (received.status, received.json["error"]["code"]) == (502, "unexpected_status")
    assert "location" not in received.headers and len(router.sessions) == 0


@pytest.mark.parametrize(
    ("error", "status", "come_again"),
    [(ConnectFailed("refused"), 503, "1"), (BrokenOff("lost"), 502, None), (TimedOut("silent"), 504, None)],
)
@STREAMS
async def test_an_unreachable_engine_is_a_clear_error(
    bench: Make, error: Exception, status: int, come_again: str | None, stream: bool
) -> None:
    for failing in (0, 1):
        engines = [prefiller(), decoder()]
        router = await bench(*engines)
        engines[failing].script = [Answer(200, EVENTS if stream and failing else b"application/json", [error])]
        received = await router.client.chat("s", stream=stream)
        assert (received.status, received.headers.get("retry-after")) == (status, come_again)
        assert received.json["error"]["type"] == "server_error"
        assert received.decision == "pd" and "x-schedloom-decoder" not in received.headers
        assert len(router.sessions) == 0


async def test_an_error_that_a_stream_begins_with_gets_its_real_status(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    d.script = [Answer.stream(ERROR, "[DONE]")]
    received = await router.client.chat("s", stream=True)
    assert (received.status, received.json) == (500, ERROR)
    assert len(router.sessions) == 0


@pytest.mark.parametrize("break_off", [[BROKEN], [], [TimedOut("silent")]])
@pytest.mark.parametrize("half", [b"", b'data: {"id": "half'])
async def test_a_stream_that_breaks_ends_in_an_error_event(
    bench: Make, break_off: list[Exception], half: bytes
) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    steps = [event_bytes(ROLE), event_bytes(WORD), *([half] if half else []), *break_off]
    d.script = [Answer(200, EVENTS, steps)]
    received = await router.client.chat("s", stream=True)
    assert received.status == 200 and received.ended
    assert received.objects[:-1] == [ROLE, WORD]
    assert "error" in received.objects[-1] and "[DONE]" not in received.events
    assert len(router.sessions) == 0


FINISH = {"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
WHOLE: Any = b"".join(map(event_bytes, [ROLE, WORD, FINISH, "[DONE]"]))  # type: ignore[arg-type]


@pytest.mark.parametrize("rest", [[BROKEN], []])
@pytest.mark.parametrize("local", [False, True])
async def test_wherever_a_stream_is_cut_it_ends_in_an_error_or_is_answered_anew(
    bench: Make, rest: list[Exception], local: bool
) -> None:
    router, p, d = await with_owner(bench)
    for cut in range(len(WHOLE)):
        await router.app.membership.look_at_all()
        assert (await router.client.chat("s")).status == 200
        asked = len(p.seen)
        d.script = [Answer(200, EVENTS, [WHOLE[:cut], *rest])]
        received = await router.client.chat("s" if local else None, stream=True)
        if received.status != 200:
            assert not local and b"word" not in received.body
        elif received.decision == "fallback":
            assert received.events[-1] == "[DONE]" and len(p.seen) == asked + 1
        else:
            assert "error" in received.objects[-1] and "[DONE]" not in received.events
            assert len(p.seen) == asked + (not local)


async def test_a_whole_answer_that_breaks_is_an_error_and_not_half_an_answer(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    d.script = [Answer(200, b"application/json", [b'{"choices":[', BROKEN])]
    received = await router.client.chat("s")
    assert received.status == 502
    assert len(router.sessions) == 0


async def test_an_engines_error_in_mid_stream_is_passed_on_and_no_success(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    d.script = [Answer.stream(ROLE, WORD, ERROR, "[DONE]")]
    received = await router.client.chat("s", stream=True)
    assert received.objects == [ROLE, WORD, ERROR]
    assert len(router.sessions) == 0
    assert router.count("requests_total", route="pd", outcome="broken") == 1


@STREAMS
@pytest.mark.parametrize(
    "trouble",
    [
        Answer.error(500),
        Answer.error(503),
        Answer(200, b"application/json", [ConnectFailed("refused")]),
        Answer(200, b"application/json", [BROKEN]),
        Answer(200, EVENTS, [event_bytes(ROLE), BROKEN]),
        Answer(200, EVENTS, [event_bytes(ROLE)]),
        Answer(200, EVENTS, [BROKEN]),
        Answer(200, EVENTS, []),
        Answer.stream(ERROR, "[DONE]"),
        Answer.stream(ROLE, ERROR, "[DONE]"),
    ],
)
async def test_a_local_attempt_that_fails_before_output_falls_through(
    bench: Make, stream: bool, trouble: Answer
) -> None:
    router, p, d = await with_owner(bench)
    d.script = [trouble]
    received = await router.client.chat("s", stream=stream)
    assert (received.status, received.decision, received.text) == (200, "fallback", " word word word")
    assert len(p.seen) == 2
    assert router.count("local_attempt_results_total", result="error") == 1


@STREAMS
async def test_a_clients_error_in_a_local_attempt_is_final(bench: Make, stream: bool) -> None:
    router, p, d = await with_owner(bench)
    for answer in (Answer.error(400, "too long"), Answer.error(422, "too long")):
        d.script = [answer]
        received = await router.client.chat("s", stream=stream)
        assert (received.status, received.json["error"]["message"]) == (answer.status, "too long")
    assert len(p.seen) == 1


async def test_nothing_is_replayed_once_output_began(bench: Make) -> None:
    router, p, d = await with_owner(bench)
    d.script = [Answer(200, EVENTS, [event_bytes(ROLE), event_bytes(WORD), BROKEN])]
    received = await router.client.chat("s", stream=True)
    assert received.decision == "append"
    assert received.objects[:-1] == [ROLE, WORD] and "error" in received.objects[-1]
    assert len(p.seen) == 1
    assert router.count("local_attempt_results_total", result="hit") == 1


async def test_a_prefillers_failure_after_a_rejection_is_the_clients_answer(bench: Make) -> None:
    router, p, d = await with_owner(bench)
    d.holds = False
    p.script = [Answer.error(503, "prefiller is full")]
    received = await router.client.chat("s", stream=True)
    assert (received.status, received.json["error"]["message"]) == (503, "prefiller is full")
    assert len(d.seen) == 2


async def test_a_decoder_failure_after_a_rejection_makes_no_second_fallback(bench: Make) -> None:
    router, p, d = await with_owner(bench)
    d.holds = False
    d.script = [Answer.stream(ROLE, "[DONE]"), Answer.error(500, "again no")]
    received = await router.client.chat("s", stream=True)
    assert (received.status, received.json["error"]["message"]) == (500, "again no")
    assert len(p.seen) == 2


async def test_a_failed_turn_leaves_an_earlier_owner_in_place(bench: Make) -> None:
    router, _, d = await with_owner(bench)
    d.script = [Answer(200, EVENTS, [event_bytes(ROLE), event_bytes(WORD), BROKEN])]
    await router.client.chat("s", stream=True)
    await until(lambda: all(worker.health is Health.READY for worker in router.app.fleet.workers))
    assert (await router.client.chat("s")).decision == "append"


async def test_a_late_hand_over_is_prefilled_again_once(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    router.upstream.too_late = 1
    received = await router.client.chat("s")
    assert (received.status, received.text) == (200, " word word word")
    assert len(p.seen) == 2
    assert len({seen.headers["x-request-id"] for seen in p.seen}) == 2
    router.upstream.too_late = 2
    received = await router.client.chat("t")
    assert received.status == 504 and "x-schedloom-decoder" not in received.headers
    assert (len(p.seen), len(d.seen)) == (4, 1)


async def test_a_restarted_owner_is_no_owner(bench: Make) -> None:
    router, _, d = await with_owner(bench)
    d.contract = contract(Role.CONSUMER, epoch="e2")
    await router.app.membership.look_at_all()
    assert (await router.client.chat("s")).decision == "pd"
    assert (await router.client.chat("s")).decision == "append"


async def test_a_vanished_owner_is_no_owner(bench: Make) -> None:
    p, decoders = prefiller(), [decoder(0), decoder(1)]
    router = await bench(p, *decoders)
    await router.client.chat("s")
    next(engine for engine in decoders if engine.seen).reachable = False
    received = await router.client.chat("s")
    assert (received.status, received.decision) == (200, "fallback")
    received = await router.client.chat("s")
    assert (received.status, received.decision) == (200, "append")


async def test_with_nobody_left_the_answer_is_503(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    d.reachable = False
    await router.app.membership.look_at_all()
    received = await router.client.chat("s")
    assert (received.status, received.json["error"]["code"]) == (503, "no_decoder")
    assert p.seen == []
    assert (await router.client.get("/ready")).status == 503


@pytest.mark.parametrize(
    "phase", ["prefill", "decode-head", "decode-stream", "append-head", "append-held", "append-stream"]
)
async def test_a_client_that_leaves_reaches_the_engines_in_every_phase(bench: Make, phase: str) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    never = asyncio.Event()
    begun = asyncio.Event()

    async def hang(seen: Seen) -> Answer:
        begun.set()
        if phase.endswith("head") or phase == "prefill":
            await never.wait()
        said = [ROLE] if phase == "append-held" else [ROLE, WORD]
        return Answer(200, EVENTS, [*map(event_bytes, said), never])

    if phase.startswith("append"):
        await router.client.chat("s")
    (p if phase == "prefill" else d).script = [hang]
    request = asyncio.create_task(router.client.chat("s", stream=True))
    await begun.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert sum(router.in_flight) == 1
    dispatched = len(p.seen) + len(d.seen)
    router.client.leave.set()
    await request
    assert (p if phase == "prefill" else d).cancelled == 1
    assert router.in_flight == [0, 0]
    assert len(p.seen) + len(d.seen) == dispatched
    route = "append" if phase.startswith("append") else "pd"
    assert router.count("requests_total", route=route, outcome="client_left") == 1


async def test_a_client_that_leaves_at_the_end_mark_still_had_its_turn(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    never = asyncio.Event()
    finish = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    d.script = [Answer(200, EVENTS, [*map(event_bytes, [ROLE, WORD, finish, "[DONE]"]), never])]
    request = asyncio.create_task(router.client.chat("s", stream=True))
    while len(router.sessions) == 0:
        await asyncio.sleep(0)
    router.client.leave.set()
    received = await request
    assert received.ended
    router.client.leave.clear()
    assert (await router.client.chat("s")).decision == "append"
