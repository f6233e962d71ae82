"""X2: metering on vLLM's real schedulers."""

from itertools import count
from typing import Any

from vllm.v1.core.sched.interface import PauseState

from schedloom import Policy, hookimpl
from schedloom.core.decisions import StepOutcome
from schedloom.core.registry import Registry
from tests.adapters.engine.conftest import Make
from tests.adapters.engine.harness import BLOCK, TOKEN, FakeRunner, make_request, tokens


class AtMostTen(Policy):
    name = "fake"

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self.asked = 0
        self.outcomes: list[StepOutcome] = []

    @hookimpl
    def limit_tokens(self) -> int:
        self.asked += 1
        return 10

    @hookimpl
    def step_end(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)


class Fakes(Registry):
    def __init__(self, policy: type[Policy]) -> None:
        super().__init__([])
        self.policy = policy

    def load(self, name: str) -> type[Policy]:
        return self.policy


def only_policy(runner: FakeRunner) -> Any:
    (policy,) = runner.scheduler.policies.policies
    return policy


def test_prefill_is_cut_into_chunks_and_the_answer_is_the_same(make: Make) -> None:
    runner = make("fake", registry=Fakes(AtMostTen))
    runner.scheduler.add_request(make_request("long", tokens(1, 95), max_tokens=6))
    chunks = []
    while runner.scheduler.has_requests():
        chunks.append(runner.step().num_scheduled_tokens.get("long", 0))
    runner.drain()
    assert chunks[:10] == [10] * 9 + [5]
    assert runner.produced["long"] == [TOKEN] * 6


def test_where_prompts_are_not_cut_a_limit_lets_them_in_as_a_whole(make: Make) -> None:
    runner = make("fake", registry=Fakes(AtMostTen))
    runner.scheduler.scheduler_config.enable_chunked_prefill = False
    runner.scheduler.add_request(make_request("long", tokens(1, 95), max_tokens=6))
    assert runner.step().num_scheduled_tokens == {"long": 95}
    runner.drain()


def test_chunks_end_where_a_mamba_state_is_kept(make: Make) -> None:
    """At the end of a block: a limit that is smaller than one would let a prompt wait for ever."""
    runner = make("fake", registry=Fakes(AtMostTen))
    runner.scheduler.need_mamba_block_aligned_split = True
    runner.scheduler.add_request(make_request("long", tokens(1, 4 * BLOCK + 5), max_tokens=6))
    chunks = [runner.step().num_scheduled_tokens.get("long", 0) for _ in range(5)]
    assert chunks == [BLOCK] * 4 + [5]
    runner.drain()
    assert runner.produced["long"] == [TOKEN] * 6


def test_a_step_without_prefill_is_not_metered(make: Make) -> None:
    runner = make("fake", registry=Fakes(AtMostTen))
    runner.scheduler.add_request(make_request("short", tokens(1, 8), max_tokens=30))
    runner.steps(4)
    policy = only_policy(runner)
    asked = policy.asked
    runner.steps(10)
    assert policy.asked == asked
    assert runner.scheduler._reserve_prefill_lookahead == runner.scheduler._stock_reserve


def test_decodes_are_never_trimmed_beside_prefill(make: Make) -> None:
    runner = make("fake", registry=Fakes(AtMostTen))
    runner.scheduler.add_request(make_request("stream", tokens(1, 8), max_tokens=40))
    runner.steps(3)
    runner.scheduler.add_request(make_request("long", tokens(2, 100)))
    for _ in range(8):
        scheduled = runner.step().num_scheduled_tokens
        assert scheduled["stream"] == 1
        assert scheduled["long"] == 10


def test_steps_are_reported(make: Make) -> None:
    runner = make("fake", registry=Fakes(AtMostTen))
    runner.scheduler.add_request(make_request("long", tokens(1, 25), max_tokens=4))
    runner.drain()
    outcomes = only_policy(runner).outcomes
    assert [outcome.prefill_tokens for outcome in outcomes[:3]] == [9, 9, 4]
    assert outcomes[0].seconds is None
    assert all(outcome.seconds is not None and outcome.seconds > 0 for outcome in outcomes[1:3])


def test_drafts_are_no_prefill(make: Make) -> None:
    runner = make("fake", registry=Fakes(AtMostTen))
    runner.scheduler.num_spec_tokens = 3
    runner.scheduler.add_request(make_request("stream", tokens(1, 8), max_tokens=20))
    runner.steps(3)
    policy = only_policy(runner)
    told, drafted = len(policy.outcomes), 0
    for _ in range(6):
        runner.scheduler.requests["stream"].spec_token_ids = [TOKEN + 1] * 3
        drafted += len(runner.step().scheduled_spec_decode_tokens)
    assert drafted
    assert {outcome.prefill_tokens for outcome in policy.outcomes[told:]} == {0}


def test_the_guard_itself(make: Make) -> None:
    runner = make("tpot_guard")
    for index in range(4):
        runner.scheduler.add_request(make_request(f"stream {index}", tokens(index, 20), max_tokens=60))
    runner.steps(10)
    runner.scheduler.add_request(make_request("long", tokens(9, 1000)))
    runner.drain()
    assert {reason for reason, _ in runner.ended.values()} == {"length"}
    assert len(runner.produced["long"]) == 4


def test_a_pause_is_no_steps_time(make: Make) -> None:
    runner = make("fake", registry=Fakes(AtMostTen))
    clock = iter(range(10**6))
    runner.scheduler.view.clock = lambda: float(next(clock))
    runner.scheduler.add_request(make_request("running", tokens(1, 8), max_tokens=40))
    runner.steps(4)
    runner.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    clock = iter(range(10**6, 2 * 10**6))
    runner.scheduler.set_pause_state(PauseState.UNPAUSED)
    runner.steps(4)
    taken = [outcome.seconds for outcome in only_policy(runner).outcomes]
    assert taken.count(None) == 2 and max(filter(None, taken)) < 10**5, taken


def test_the_time_that_a_policy_is_off_is_no_steps_time(make: Make) -> None:
    runner = make("fake", registry=Fakes(AtMostTen))
    clock = count()
    runner.scheduler.view.clock = lambda: float(next(clock))
    runner.scheduler.add_request(make_request("running", tokens(1, 8), max_tokens=60))
    runner.steps(4)
    for mode in ("off", "on"):
        for caller in runner.scheduler._callers:
            caller.set_modes({"fake": mode})
        runner.steps(4)
        clock = count(10**6)
    taken = [outcome.seconds for outcome in only_policy(runner).outcomes]
    assert len(taken) > 4 and max(filter(None, taken)) < 10**5, taken
