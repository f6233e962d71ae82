"""R11: a router that begins anew, or a second one, finds every session where it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from schedloom.router.laboratory.client import Received
from tests.router.conftest import Bench, Make
from tests.router.fakes import Answer, FakeEngine, decoder, prefiller
from tests.router.waiting import until

pytestmark = pytest.mark.anyio

POLICIES: list[dict[str, Any]] = [{"name": "rendezvous"}, {"name": "power_of_two"}]
SESSIONS = [f"session-{number}" for number in range(24)]
FIRST = [{"role": "user", "content": "hello"}]
NEXT = [*FIRST, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "go on"}]
Homes = dict[str, tuple[str, str | None]]


def fleet() -> tuple[list[FakeEngine], list[FakeEngine]]:
    return [prefiller(n) for n in range(3)], [*(decoder(n) for n in range(3)), decoder(3, data_parallel_size=2)]


def homes(engines: Sequence[FakeEngine], since: int = 0) -> Homes:
    """The engine and the rank of every session that it served."""
    return {
        seen.headers["x-session-id"]: (engine.origin, seen.headers.get("x-data-parallel-rank"))
        for engine in engines
        for seen in engine.seen[since:]
    }


def forget(engines: Sequence[FakeEngine]) -> None:
    for engine in engines:
        engine.seen.clear()


async def turns(router: Bench, messages: list[dict[str, str]], **body: Any) -> list[Received]:
    received = [await router.client.chat(session, messages=messages, **body) for session in SESSIONS]
    assert {one.status for one in received} == {200}
    return received


async def test_a_restarted_router_finds_every_session_at_its_engines(bench: Make) -> None:
    """The other one names the engines in another order, and so by other names."""
    prefillers, decoders = fleet()
    before = await bench(*prefillers, *decoders, policies=POLICIES)
    assert {one.decision for one in await turns(before, FIRST)} == {"pd"}
    homes_of_prefill, homes_of_decode = homes(prefillers), homes(decoders)
    assert {origin for origin, _ in homes_of_prefill.values()} == {one.origin for one in prefillers}
    assert len(set(homes_of_decode.values())) == 5
    forget([*prefillers, *decoders])

    after = await bench(*prefillers[::-1], *decoders[::-1], policies=POLICIES)
    assert {one.decision for one in await turns(after, NEXT)} == {"append"}
    assert homes(decoders) == homes_of_decode and homes(prefillers) == {}
    assert after.count("local_attempt_results_total", result="hit") == len(SESSIONS)

    forget(decoders)
    for engine in decoders:
        engine.holds = False
    assert {one.decision for one in await turns(before, NEXT)} == {"fallback"}
    assert homes(prefillers) == homes_of_prefill and homes(decoders) == homes_of_decode


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_decoder_lost_costs_one_fallback(bench: Make, stream: bool) -> None:
    prefillers, decoders = fleet()
    before = await bench(*prefillers, *decoders, policies=POLICIES)
    await turns(before, FIRST)
    homes_of_prefill, homes_of_decode = homes(prefillers), homes(decoders)
    forget([*prefillers, *decoders])
    for engine in decoders:
        engine.holds = False

    after = await bench(*prefillers, *decoders, policies=POLICIES)
    received = await turns(after, NEXT, stream=stream)
    assert {one.decision for one in received} == {"fallback"}
    attempts = [seen.is_local_attempt for engine in decoders for seen in engine.seen]
    assert attempts.count(True) == attempts.count(False) == len(SESSIONS)
    assert sum(len(engine.seen) for engine in prefillers) == len(SESSIONS)
    assert homes(prefillers) == homes_of_prefill and homes(decoders) == homes_of_decode
    assert after.count("retries_total") == 0

    for engine in decoders:
        engine.holds = True
    assert {one.decision for one in await turns(after, NEXT)} == {"append"}


async def test_first_turns_and_completions_are_not_tried(bench: Make) -> None:
    prefillers, decoders = fleet()
    router = await bench(*prefillers, *decoders, policies=POLICIES)
    assert {one.decision for one in await turns(router, FIRST)} == {"pd"}
    other = await bench(*prefillers, *decoders, policies=POLICIES)
    completion = {"model": "fake-model", "prompt": "hello"}
    assert (await other.client.post("/v1/completions", completion, {"X-Session-ID": "s"})).decision == "pd"
    assert not any(seen.is_local_attempt for engine in decoders for seen in engine.seen)


async def test_without_the_policy_a_restarted_router_begins_anew(bench: Make) -> None:
    prefillers, decoders = fleet()
    await turns(await bench(*prefillers, *decoders), FIRST)
    after = await bench(*prefillers, *decoders)
    assert {one.decision for one in await turns(after, NEXT)} == {"pd"}


async def test_what_one_transfer_cannot_serve_goes_to_the_sessions_decoder(bench: Make) -> None:
    prefillers, decoders = fleet()
    await turns(await bench(*prefillers, *decoders, policies=POLICIES), FIRST)
    at_home = homes(decoders)
    forget(decoders)
    after = await bench(*prefillers, *decoders, policies=POLICIES)
    assert {one.decision for one in await turns(after, NEXT, n=2)} == {"decode"}
    assert homes(decoders) == at_home


async def test_an_engine_that_is_left_out_gets_no_attempts(bench: Make) -> None:
    """Its sessions go to their next engine; everybody else's stay."""
    prefillers, decoders = fleet()
    await turns(await bench(*prefillers, *decoders, policies=POLICIES), FIRST)
    at_home = homes(decoders)
    failing = decoders[3]
    assert [origin for origin, _ in at_home.values()].count(failing.origin) > 5
    forget(decoders)
    failing.always = Answer.error(500)
    after = await bench(*prefillers, *decoders, policies=POLICIES)
    for _ in range(3):
        await turns(after, NEXT)
        await after.app.membership.look_at_all()
    assert len(failing.seen) == 5
    others = {session: home for session, home in at_home.items() if home[0] != failing.origin}
    assert homes(decoders[:3]).items() >= others.items()


async def test_a_place_that_is_too_busy_gives_its_sessions_to_the_next(bench: Make) -> None:
    prefillers, decoders = fleet()
    router = await bench(*prefillers, *decoders, policies=[{"name": "rendezvous", "max_lead": 2}])
    await turns(router, FIRST)
    busy = router.app.fleet.decoders[0]
    theirs = [session for session, (origin, _) in homes(decoders).items() if origin == busy.origin]
    second: list[Homes] = []
    for _ in range(2):
        forget(decoders)
        again = await bench(*prefillers, *decoders, policies=[{"name": "rendezvous", "max_lead": 2}])
        worker = again.app.fleet.decoders[0]
        with worker.serving(0), worker.serving(0), worker.serving(0):
            assert {(await again.client.chat(one, messages=NEXT)).decision for one in theirs} == {"pd"}
        second.append(homes(decoders))
    assert second[0] == second[1] and set(second[0]) == set(theirs)
    assert busy.origin not in {origin for origin, _ in second[0].values()}


@pytest.mark.parametrize("leaves", ["marked", "gone"])
async def test_only_the_sessions_of_an_engine_that_drains_move_and_they_come_home_with_it(
    bench: Make, leaves: str
) -> None:
    """Another name it may have by then."""
    prefillers, decoders = fleet()
    everybody = [*prefillers, *decoders]
    router = await bench(*everybody, policies=POLICIES, append=False)
    before = await anew(router, prefillers, decoders)

    for leaving in (prefillers[0], decoders[0]):
        rest = [engine for engine in everybody if engine is not leaving]
        router.renew(*(everybody if leaves == "marked" else rest), drain=leaving)
        meanwhile = await anew(router, prefillers, decoders)
        assert {one for one in before if meanwhile[one] != before[one]} == {
            one for one, (origin, _) in before.items() if origin == leaving.origin
        }
        router.renew(*everybody)
        await all_ready(router, len(everybody))
        assert await anew(router, prefillers, decoders) == before


async def all_ready(router: Bench, count: int) -> None:
    await until(lambda: list(router.states.values()) == ["ready"] * count)


async def anew(router: Bench, prefillers: Sequence[FakeEngine], decoders: Sequence[FakeEngine]) -> Homes:
    """Where first turns go."""
    forget([*prefillers, *decoders])
    await turns(router, FIRST)
    return homes(prefillers) | {f"{session}, decoded": home for session, home in homes(decoders).items()}
