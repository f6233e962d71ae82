"""A6, A8, A9, X4: requests handed back to the router and continued from its tickets, on vLLM's real schedulers."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import PauseState
from vllm.v1.request import RequestStatus

from schedloom.adapters.engine.parts import recovery
from schedloom.core.continuation import HandBack, Ticket, digest
from schedloom.core.wire import LOCAL_ATTEMPT_KEY, PROTOCOL_VERSION, REJECTION_PREFIX
from tests.adapters.engine.conftest import Make, choose
from tests.adapters.engine.handing import TellingRunner, answer
from tests.adapters.engine.harness import tokens

ANY_LENGTH = choose("recompute", min_returned_tokens=1)
LONG = 200
"""Tokens of an answer, two of which a pool of 25 blocks cannot hold."""


in_flight = pytest.mark.parametrize("asynchronous", [True], indirect=True, ids=["async"])
"""Only with asynchronous scheduling something is in flight when a request is preempted."""


@pytest.fixture
def engine(make: Make) -> TellingRunner:
    """A Decoder in whose pool two long answers do not fit."""
    return TellingRunner.over(make(ANY_LENGTH, num_blocks=25))


@pytest.fixture
def roomy(make: Make) -> TellingRunner:
    return TellingRunner.over(make(ANY_LENGTH))


def prompt(seed: int) -> list[int]:
    return tokens(seed, 50)


def two_long(runner: TellingRunner, **more: Any) -> None:
    for number in range(2):
        runner.add(f"r{number}", prompt(number), LONG, **more)


def ticket_after(seed: int, count: int) -> Ticket:
    return Ticket(digest(prompt(seed)), answer(prompt(seed), count))


def test_a_victim_goes_back_with_all_that_its_client_has(engine: TellingRunner) -> None:
    two_long(engine)
    handed = engine.until_handed_back("r1")
    assert (handed.reason, list(handed.prompt)) == ("preempted", prompt(1))
    assert list(handed.output) == engine.produced["r1"] == answer(prompt(1), len(handed.output))
    assert 0 < len(handed.output) < LONG
    engine.drain()
    assert engine.ended["r0"] == ("length", None)
    assert engine.produced["r0"] == answer(prompt(0), LONG)
    assert engine.decisions("recover") == {("RETURN", "return"): 1, ("HANDED_BACK", "preempted"): 1}
    assert engine.leaks() == []


def test_a_continuation_tells_the_whole_answer(engine: TellingRunner, roomy: TellingRunner) -> None:
    two_long(engine)
    handed = engine.until_handed_back("r1")
    roomy.add("again", prompt(1), LONG, ticket=handed.ticket)
    roomy.drain()
    assert roomy.produced["again"] == answer(prompt(1), LONG)
    assert roomy.ended["again"] == ("length", None)
    assert roomy.decisions("resume") == {("RESUME", "continued"): 1}
    assert roomy.leaks() == []


def test_what_was_handed_back_twice_is_whole(make: Make, roomy: TellingRunner) -> None:
    handed = None
    for _ in range(2):
        engine = TellingRunner.over(make(ANY_LENGTH, num_blocks=25))
        engine.add("other", prompt(0), LONG)
        engine.steps(30)
        engine.add("r", prompt(1), LONG, ticket=handed.ticket if handed else None)
        before = len(handed.output) if handed else 0
        handed = engine.until_handed_back("r")
        assert list(handed.prompt) == prompt(1)
        assert list(handed.output) == engine.produced["r"] == answer(prompt(1), len(handed.output))
        assert len(handed.output) > before
        engine.drain()
        assert engine.leaks() == []
    assert handed is not None
    roomy.add("r", prompt(1), LONG, ticket=handed.ticket)
    roomy.drain()
    assert roomy.produced["r"] == answer(prompt(1), LONG)


def test_output_in_flight_is_waited_for(make: Make, asynchronous: bool) -> None:
    """Without a connector, vLLM preempts a request whose last step has not come back yet."""
    engine = hold(make)
    had = list(engine.produced["r1"])
    in_flight = engine.scheduler.requests["r1"].num_stale_output_tokens
    assert in_flight == (1 if asynchronous else 0)
    engine.begin()
    assert "r1" not in engine.in_flight[-1].num_scheduled_tokens
    engine.finish()
    handed = engine.until_handed_back("r1")
    assert list(handed.output) == engine.produced["r1"] == answer(prompt(1), len(handed.output))
    assert len(handed.output) == len(had) + in_flight
    engine.drain()
    assert engine.leaks() == []


def hold(make: Make, depth: int | None = None) -> TellingRunner:
    """An engine, with up to ``depth`` batches in flight, in which r1 waits, without KV, for its output in flight."""
    engine = TellingRunner.over(make(ANY_LENGTH, num_blocks=25, role=None))
    engine.depth = depth or engine.depth
    two_long(engine)
    while True:
        engine.begin()
        if "r1" in engine.scheduler._held:
            return engine
        if len(engine.in_flight) >= engine.depth:
            engine.finish()


@in_flight
def test_output_of_several_steps_in_flight_is_waited_for(make: Make) -> None:
    """As with pipeline parallelism, more than two batches deep."""
    engine = hold(make, depth=4)
    had = len(engine.produced["r1"])
    assert engine.scheduler.requests["r1"].num_stale_output_tokens == 3
    for drained in range(1, 4):
        assert engine.handed_back("r1") is None
        engine.finish()
        assert len(engine.produced["r1"]) == had + drained
    handed = engine.handed_back("r1")
    assert handed is not None and list(handed.output) == engine.produced["r1"]
    engine.drain()
    assert engine.produced["r0"] == answer(prompt(0), LONG)
    assert engine.leaks() == []


@in_flight
def test_a_held_request_that_meets_its_end_just_ends(make: Make) -> None:
    engine = hold(make)
    request = engine.scheduler.requests["r1"]
    request.max_tokens = request.num_output_tokens + 1
    engine.drain()
    assert engine.ended["r1"] == ("length", None)
    assert engine.produced["r1"] == answer(prompt(1), request.max_tokens)
    assert engine.leaks() == []


@in_flight
def test_a_held_request_can_be_aborted(make: Make) -> None:
    engine = hold(make)
    engine.scheduler.finish_requests("r1", RequestStatus.FINISHED_ABORTED)
    engine.drain()
    assert "r1" not in engine.ended
    assert engine.produced["r0"] == answer(prompt(0), LONG)
    assert engine.leaks() == []


@in_flight
def test_a_held_request_survives_a_reset(make: Make) -> None:
    engine = hold(make)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    handed = engine.until_handed_back("r1")
    assert list(handed.output) == engine.produced["r1"] == answer(prompt(1), len(handed.output))
    engine.drain()
    assert engine.produced["r0"] == answer(prompt(0), LONG)
    assert engine.leaks() == []


@in_flight
def test_a_pause_does_not_lose_a_held_request(make: Make) -> None:
    engine = hold(make)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.steps(4)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.drain()
    handed = engine.handed_back("r1")
    assert handed is not None and list(handed.output) == engine.produced["r1"]
    assert engine.leaks() == []


def test_a_reset_hands_nothing_back(make: Make) -> None:
    engine = TellingRunner.over(make(ANY_LENGTH, role=None))
    two_long(engine)
    engine.steps(20)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.drain()
    assert [engine.produced[f"r{number}"] for number in range(2)] == [answer(prompt(number), LONG) for number in (0, 1)]
    assert engine.decisions("recover") == {}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"marked": False}, "unmarked"),
        ({"seed": 7}, "seed"),
        ({"extra": {"my_processor": 1}}, "extra_args"),
    ],
)
def test_what_cannot_be_continued_is_preempted_as_ever(engine: TellingRunner, more: Any, reason: str) -> None:
    two_long(engine, **more)
    engine.drain(1500)
    assert [engine.produced[f"r{number}"] for number in range(2)] == [answer(prompt(number), LONG) for number in (0, 1)]
    assert {verdict for verdict, _ in engine.decisions("recover")} == {"RECOMPUTE"}
    assert {reason for _, reason in engine.decisions("recover")} == {reason}


def test_children_of_one_request_are_not_handed_back(engine: TellingRunner) -> None:
    for number in range(2):
        engine.add(f"{number}_cmpl-1", prompt(number), LONG)
    engine.drain(1500)
    assert engine.decisions("recover").keys() == {("RECOMPUTE", "n")}


def while_pinned(engine: TellingRunner, steps: int) -> None:
    """Step while somebody else holds all free blocks."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    pinned = pool.get_new_blocks(pool.get_num_free_blocks())
    engine.steps(steps)
    pool.free_blocks(pinned)


def test_the_only_request_with_kv_stays(engine: TellingRunner) -> None:
    """Blocks that somebody else pins drive it out; nowhere else would it fare better."""
    engine.add("alone", prompt(1), LONG)
    engine.steps(5)
    while_pinned(engine, 30)
    engine.drain()
    assert engine.produced["alone"] == answer(prompt(1), LONG)
    assert engine.decisions("recover").keys() == {("RECOMPUTE", "sole_request")}


def test_a_request_without_output_stays(make: Make) -> None:
    """vLLM before 0.33 does not tell the end of a stream that had no token."""
    engine = TellingRunner.over(make(ANY_LENGTH, num_blocks=60, token_budget=64))
    engine.add("first", prompt(0), LONG)
    engine.steps(3)
    engine.add("long", tokens(2, 400), 2)
    engine.steps(2)
    while_pinned(engine, 30)
    engine.drain()
    assert engine.produced["long"] == answer(tokens(2, 400), 2)
    assert engine.decisions("recover").keys() == {("RECOMPUTE", "no_output")}


def test_few_computed_tokens_are_not_worth_it(make: Make) -> None:
    engine = TellingRunner.over(make(choose("recompute", min_returned_tokens=10_000), num_blocks=25))
    two_long(engine)
    engine.drain(1500)
    assert engine.decisions("recover") == {}
    assert engine.produced["r1"] == answer(prompt(1), LONG)


def test_the_lowest_priority_goes_back(make: Make) -> None:
    engine = TellingRunner.over(make(ANY_LENGTH, num_blocks=25))
    engine.scheduler.policy = type(engine.scheduler.policy).PRIORITY
    engine.add("low", prompt(0), LONG, priority=5)
    engine.add("high", prompt(1), LONG, priority=1)
    handed = engine.until_handed_back("low")
    assert list(handed.output) == engine.produced["low"]
    engine.drain()
    assert engine.produced["high"] == answer(prompt(1), LONG)


class Store:
    """A fake of a connector that saves preempted requests, until it is full."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.taken: list[str] = []

    def update_state_before_preempt(self, request: Any, block_ids: Any, num_tokens: int) -> bool:
        if len(self.taken) == self.capacity:
            return False
        self.taken.append(request.request_id)
        return True


@pytest.mark.parametrize("names", [("offload_restore", "recompute"), ("recompute", "offload_restore")])
def test_host_memory_comes_first_and_the_router_second(
    make: Make, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(capacity=1)
    monkeypatch.setattr(recovery, "preemption_stores", lambda connector: [store])
    least = {"offload_restore": "min_saved_tokens", "recompute": "min_returned_tokens"}
    engine = TellingRunner.over(make(*(choose(name, **{least[name]: 1}) for name in names), num_blocks=25))
    two_long(engine)
    engine.add("r2", prompt(2), LONG)
    engine.until_handed_back("r0", "r1", "r2")
    ways = [("OFFLOAD", "offload"), ("RETURN", "not_saved"), ("HANDED_BACK", "preempted")]
    assert list(engine.decisions("recover").items()) == [(way, 1) for way in ways]


def test_who_is_not_saved_and_not_returned_is_told_why(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "preemption_stores", lambda connector: [])
    policies = (ANY_LENGTH, choose("offload_restore", min_saved_tokens=1))
    engine = TellingRunner.over(make(*policies, num_blocks=25))
    two_long(engine, marked=False)
    engine.drain(1500)
    assert engine.decisions("recover").keys() == {("RECOMPUTE", "unmarked")}


# Continuing


@pytest.mark.parametrize(
    ("ticket", "reason"),
    [
        (Ticket(digest([1, 2]), [3]), "prompt_differs"),
        (Ticket(digest(prompt(1)), [512]), "bad_ticket"),
        (Ticket(digest(prompt(1)), [-1]), "bad_ticket"),
        ("nonsense", "bad_ticket"),
        ("", "bad_ticket"),
    ],
)
def test_a_ticket_that_does_not_fit_is_turned_away(roomy: TellingRunner, ticket: Any, reason: str) -> None:
    roomy.add("r", prompt(1), LONG, ticket=ticket)
    roomy.drain()
    assert roomy.ended == {"r": ("stop", REJECTION_PREFIX + reason)}
    assert roomy.produced["r"] == []
    assert roomy.leaks() == []


def test_a_continuation_that_needs_more_than_tokens_is_turned_away(roomy: TellingRunner) -> None:
    roomy.add("r", prompt(1), LONG, ticket=ticket_after(1, 5), logprobs=1)
    roomy.drain()
    assert roomy.ended == {"r": ("stop", REJECTION_PREFIX + "bad_ticket")}


def test_a_continuation_that_is_turned_away_for_its_kv_tells_nothing(make: Make) -> None:
    engine = TellingRunner.over(make(ANY_LENGTH, "append_prefill"))
    engine.add("r", tokens(1, 300), LONG, ticket=Ticket(digest(tokens(1, 300)), [1]), extra=LOCAL_MARK)
    engine.drain()
    assert engine.ended == {"r": ("stop", REJECTION_PREFIX + "no_usable_prefix")}
    assert engine.produced["r"] == []
    assert engine.leaks() == []


LOCAL_MARK = {LOCAL_ATTEMPT_KEY: PROTOCOL_VERSION}


@pytest.mark.parametrize("told", [1, 15, 16, LONG - 1])
def test_a_continuation_ends_at_its_clients_limit(roomy: TellingRunner, told: int) -> None:
    original = prompt(1)
    roomy.add("r", original, LONG, ticket=ticket_after(1, told), marked=False)
    roomy.drain()
    assert roomy.produced["r"] == answer(prompt(1), LONG)
    assert roomy.ended["r"] == ("length", None)
    assert original == prompt(1), "the list belongs to the front end too"


@pytest.mark.parametrize("told", [40, 50])
def test_a_continuation_ends_at_the_models_limit(roomy: TellingRunner, told: int) -> None:
    roomy.scheduler.max_model_len = 100
    roomy.add("r", prompt(1), 1000, ticket=ticket_after(1, told))
    roomy.drain()
    assert roomy.produced["r"] == answer(prompt(1), 50)
    assert roomy.ended["r"] == ("length", None)


@pytest.mark.parametrize("limit", [30, 29])
def test_a_ticket_with_the_whole_answer_ends_at_once(roomy: TellingRunner, limit: int) -> None:
    roomy.add("r", prompt(1), limit, ticket=ticket_after(1, 30))
    roomy.drain()
    assert roomy.ended["r"] == ("length", None)
    assert roomy.produced["r"] == answer(prompt(1), 30)
    assert roomy.leaks() == []


def test_an_empty_ticket_starts_from_the_prompt(roomy: TellingRunner) -> None:
    roomy.add("r", prompt(1), 20, ticket=Ticket(digest(prompt(1)), []))
    roomy.drain()
    assert roomy.produced["r"] == answer(prompt(1), 20)


def test_a_continuation_reuses_the_kv_of_prompt_and_output(roomy: TellingRunner) -> None:
    roomy.add("first", prompt(1), 100)
    roomy.drain()
    roomy.add("again", prompt(1), LONG, ticket=ticket_after(1, 100))
    scheduled = roomy.step().num_scheduled_tokens["again"]
    assert scheduled == 150 - 144
    roomy.drain()
    assert roomy.produced["again"] == answer(prompt(1), LONG)


def test_a_continuation_aborted_before_its_first_token_leaves_nothing(roomy: TellingRunner) -> None:
    roomy.add("r", prompt(1), LONG, ticket=ticket_after(1, 5))
    roomy.add("other", prompt(2), 20)
    roomy.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    roomy.drain()
    assert "r" not in roomy.ended
    assert roomy.leaks() == []


def test_a_continuation_that_ends_in_an_error_tells_what_it_had(roomy: TellingRunner) -> None:
    roomy.add("r", prompt(1), LONG, ticket=ticket_after(1, 5))
    roomy.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    roomy.scheduler.encoder_cache_mismatch_reqs.add("r")
    roomy.steps(2)
    roomy.scheduler.set_pause_state(PauseState.UNPAUSED)
    roomy.drain()
    assert roomy.ended["r"][0] == "error"
    assert roomy.produced["r"] == answer(prompt(1), 5)
    assert roomy.leaks() == []


def test_continuations_are_preempted_again_and_stay_whole(make: Make) -> None:
    """Unmarked ones, which are computed again here."""
    engine = TellingRunner.over(make(ANY_LENGTH, num_blocks=25))
    for number in range(3):
        engine.add(f"r{number}", prompt(number), LONG, ticket=ticket_after(number, 7 + number), marked=False)
    engine.drain(2000)
    assert engine.decisions("recover")
    for number in range(3):
        assert engine.produced[f"r{number}"] == answer(prompt(number), LONG)
    assert engine.leaks() == []


def test_switched_off_it_hands_nothing_back_and_still_continues(engine: TellingRunner) -> None:
    for caller in engine.scheduler._callers:
        caller.set_modes({"recompute": "off"})
    two_long(engine)
    engine.add("again", prompt(3), LONG, ticket=ticket_after(3, 20))
    engine.drain(2000)
    assert engine.decisions("recover") == {}
    assert engine.produced["again"] == answer(prompt(3), LONG)
    assert engine.produced["r1"] == answer(prompt(1), LONG)


def test_in_shadow_it_is_counted_and_nothing_is_done(engine: TellingRunner) -> None:
    for caller in engine.scheduler._callers:
        caller.set_modes({"recompute": "shadow"})
    two_long(engine)
    engine.drain(1500)
    assert engine.produced["r1"] == answer(prompt(1), LONG)
    shadows = [count for caller in engine.scheduler._callers for key, count in caller.counts.items() if "SHADOW" in key]
    assert sum(shadows) > 0


def test_a_hand_back_reads_back() -> None:
    handed = HandBack("preempted", prompt(1), [1, 2, 3])
    assert HandBack.read(handed.stop_reason) == HandBack("preempted", tuple(prompt(1)), (1, 2, 3))
