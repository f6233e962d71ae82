"""A4, C3: the order of the waiting queue on vLLM's real schedulers."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from schedloom import Policy, hookimpl
from schedloom.adapters.engine import queues
from schedloom.core.composition import PolicyChoice, compose
from schedloom.core.decisions import Lane
from schedloom.core.errors import ConfigurationError
from schedloom.core.views import RequestView
from schedloom.core.wire import JOB_CLASS_KEY
from tests.adapters.engine.conftest import Make, choose
from tests.adapters.engine.harness import FakeRunner, make_request, make_scheduler, tokens, vllm_config
from tests.adapters.engine.scenarios import cold_attempt, preempted_attempt, warm_attempt
from tests.adapters.engine.test_admission import OnePolicy
from tests.adapters.engine.test_phases import Loads

SHORT_FIRST = choose("short_request_first", short_tokens=100, max_wait_seconds=10)
BATCH = choose("batch_job_aware", max_active=2, max_wait_seconds=60)


class Clock:
    def __init__(self, runner: FakeRunner) -> None:
        self.now = 0.0
        runner.scheduler.view.clock = lambda: self.now


def add(runner: FakeRunner, name: str, length: int = 20, job: str | None = None, **more: Any) -> None:
    request = make_request(name, tokens(sum(map(ord, name)), length), **more)
    request.sampling_params.extra_args = {**(request.sampling_params.extra_args or {}), JOB_CLASS_KEY: job}
    runner.scheduler.add_request(request)


def order_of_first_tokens(runner: FakeRunner, max_steps: int = 400) -> list[str]:
    runner.drain(max_steps)
    return list(runner.produced)


def busy(make: Make, *choices: Any, **config: Any) -> FakeRunner:
    """One slot, and somebody in it."""
    runner = make(*choices, max_num_seqs=1, **config)
    add(runner, "busy", max_tokens=12)
    runner.steps(2)
    return runner


def test_short_requests_go_first_and_keep_their_order(make: Make) -> None:
    runner = busy(make, SHORT_FIRST)
    for name, length in (("long 1", 300), ("short 1", 50), ("long 2", 200), ("short 2", 100)):
        add(runner, name, length)
    assert order_of_first_tokens(runner) == ["busy", "short 1", "short 2", "long 1", "long 2"]


@pytest.mark.parametrize("mode", ["off", "shadow"])
def test_switched_off_those_who_wait_already_go_in_the_order_in_which_they_came(make: Make, mode: str) -> None:
    runner = busy(make, SHORT_FIRST)
    for name, length in (("long 1", 300), ("short 1", 50), ("long 2", 200), ("short 2", 100)):
        add(runner, name, length)
    runner.steps(2)
    for caller in runner.scheduler._callers:
        caller.set_modes({"short_request_first": mode})
    add(runner, "short 3", 10)
    assert order_of_first_tokens(runner) == ["busy", "long 1", "short 1", "long 2", "short 2", "short 3"]


def test_a_long_request_is_passed_over_no_longer_than_the_bound(make: Make) -> None:
    runner = busy(make, SHORT_FIRST)
    clock = Clock(runner)
    for name, length, arrival in (("long", 300, 0.0), ("short in time", 50, 9.9), ("short too late", 50, 10.1)):
        clock.now = arrival
        add(runner, name, length)
        runner.step()
    assert order_of_first_tokens(runner) == ["busy", "short in time", "long", "short too late"]


def test_a_conversation_with_little_to_compute_is_short(make: Make) -> None:
    runner = make(SHORT_FIRST, max_num_seqs=1)
    add(runner, "first turn", 400)
    runner.drain()
    history = tokens(sum(map(ord, "first turn")), 400)
    runner.produced.clear()
    add(runner, "busy", max_tokens=12)
    runner.steps(2)
    add(runner, "cold", 300)
    runner.scheduler.add_request(make_request("second turn", history + tokens(9, 30)))
    assert order_of_first_tokens(runner) == ["busy", "second turn", "cold"]


def test_a_preempted_request_goes_before_all_lanes(make: Make) -> None:
    runner = make(SHORT_FIRST, num_blocks=40, max_num_seqs=2)
    add(runner, "one", 200, max_tokens=300)
    add(runner, "two", 200, max_tokens=300)
    runner.steps(2)
    for index in range(3):
        add(runner, f"short {index}", 20)
    preempted, overtaken = False, False
    while runner.scheduler.has_requests():
        runner.step()
        comes_back = any(request.num_preemptions for request in runner.scheduler.waiting)
        preempted |= comes_back
        overtaken |= comes_back and any("short" in request.request_id for request in runner.scheduler.running)
    runner.drain()
    assert preempted, "inconclusive: nothing was preempted"
    assert not overtaken
    assert len(runner.ended) == 5


def test_batch_jobs_wait_for_interactive_requests_and_are_few_at_once(make: Make) -> None:
    runner = make(BATCH, max_num_seqs=8)
    for index in range(5):
        add(runner, f"job {index}", job="batch")
    for index in range(3):
        add(runner, f"chat {index}")
    running = [request.request_id for request in (runner.step(), runner.scheduler.running)[1]]
    assert running == ["chat 0", "chat 1", "chat 2", "job 0", "job 1"]
    most = 0
    while runner.scheduler.has_requests():
        runner.step()
        most = max(most, sum(request.request_id.startswith("job") for request in runner.scheduler.running))
    runner.drain()
    assert most == 2
    assert len(runner.ended) == 8


def test_jobs_whose_loads_begin_within_one_step_count_against_the_bound(make: Make) -> None:
    runner = make(BATCH, max_num_seqs=8)
    loads = Loads(runner.scheduler, "job")
    for index in range(5):
        add(runner, f"job {index}", 50, job="batch")
    runner.step()
    assert loads.loading == ["job 0", "job 1"]
    most = 0
    while runner.scheduler.has_requests():
        most = max(most, len(loads.loading) + len(runner.scheduler.running))
        loads.arrive()
        runner.step()
    runner.drain()
    assert most == 2
    assert len(runner.ended) == 5


def test_an_old_batch_job_at_the_bound_does_not_stop_interactive_requests(make: Make) -> None:
    runner = make(BATCH, max_num_seqs=8)
    clock = Clock(runner)
    for index in range(50):
        add(runner, f"job {index}", job="batch", max_tokens=30)
    runner.steps(2)
    clock.now = 1000.0
    add(runner, "chat")
    asked = _calls(runner.scheduler, "_handle_blocked_waiting_request")
    runner.step()
    assert "chat" in [request.request_id for request in runner.scheduler.running]
    assert len(asked) == 2, "the waiting jobs were walked"


def test_an_old_batch_job_goes_before_a_young_chat(make: Make) -> None:
    runner = busy(make, BATCH)
    clock = Clock(runner)
    for name, job, arrival in (("job", "batch", 0.0), ("chat in time", None, 59.0), ("chat too late", None, 61.0)):
        clock.now = arrival
        add(runner, name, job=job)
        runner.step()
    assert order_of_first_tokens(runner) == ["busy", "chat in time", "job", "chat too late"]


@pytest.mark.parametrize("choice", [SHORT_FIRST, BATCH], ids=lambda choice: choice.name)
def test_aborts_anywhere_in_the_queue(make: Make, choice: PolicyChoice) -> None:
    runner = busy(make, choice)
    names = [f"{kind} {index}" for index in range(3) for kind in ("job", "long", "short")]
    for name in names:
        add(runner, name, 300 if "long" in name else 20, job="batch" if "job" in name else None)
        runner.step()
    gone = [name for name in names if "1" in name]
    runner.scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
    add(runner, "never seen")
    runner.scheduler.finish_requests("never seen", RequestStatus.FINISHED_ABORTED)
    runner.drain()
    assert set(runner.ended) == {"busy", *names} - set(gone)
    assert len(runner.scheduler.waiting) == 0


@pytest.mark.parametrize("choice", [SHORT_FIRST, BATCH], ids=lambda choice: choice.name)
def test_a_reset_preempts_and_everybody_comes_back(make: Make, choice: PolicyChoice) -> None:
    runner = make(choice, max_num_seqs=4, role=None)
    for index in range(6):
        add(runner, f"request {index}", 50 + 30 * index, job="batch" if index % 2 else None, max_tokens=8)
    runner.steps(3)
    assert runner.scheduler.reset_prefix_cache(reset_running_requests=True)
    runner.drain()
    assert all(len(runner.produced[f"request {index}"]) == 8 for index in range(6))


@pytest.mark.parametrize("name", ["short_request_first", "batch_job_aware"])
@pytest.mark.parametrize("reverse", [False, True])
def test_together_with_append_prefill(make: Make, name: str, reverse: bool) -> None:
    names = ["append_prefill", name][:: -1 if reverse else 1]
    assert cold_attempt(make(*names)) == []
    assert warm_attempt(make(*names)) == []
    assert preempted_attempt(make(*names, num_blocks=50)) == []


def test_a_policy_that_raises_leaves_first_come_first_served(make: Make) -> None:
    class Bad(Policy):
        name = "bad"

        @hookimpl
        def queue_key(self, request: RequestView) -> Lane:
            return Lane("late", -1.0)

    runner = busy(make, "bad", registry=OnePolicy(Bad))
    for name in ("one", "two", "three"):
        add(runner, name)
    assert order_of_first_tokens(runner) == ["busy", "one", "two", "three"]


def test_vllms_own_priorities_are_refused(model: Any) -> None:
    from schedloom.adapters.engine.selection import scheduler_class

    section = {"scheduler_config": {"policies": [{"name": "short_request_first"}]}}
    config = vllm_config(model, additional=section)
    config.scheduler_config.policy = "priority"
    message = "policy 'short_request_first' and --scheduling-policy priority both decide the order"
    for start in (
        lambda: scheduler_class(config.scheduler_config.get_scheduler_cls(), config),
        lambda: make_scheduler(_composed("short_request_first"), config),
    ):
        with pytest.raises(ConfigurationError, match=message):
            start()


def test_asking_costs_the_same_in_a_long_queue(make: Make) -> None:
    """Lanes are asked for once a request, and a step looks at none but the first."""
    runner = busy(make, SHORT_FIRST)
    asked = _calls(runner.scheduler.waiting, "_lane_of")
    for index in range(200):
        add(runner, f"request {index}", 20)
    runner.steps(3)
    assert len(asked) == 200
    add(runner, "late")
    runner.steps(30)
    assert len(asked) == 201


def test_a_queue_of_lanes_survives_what_a_scheduler_does_to_it() -> None:
    """Against a plain model: sorted by arrival and delay, preempted first, prepended back in place."""
    import random

    for seed in range(200):
        assert _play(random.Random(seed)) == []


class Waiter:
    def __init__(self, name: int, lane: Lane) -> None:
        self.request_id, self.lane, self.num_preemptions = name, lane, 0


def _play(chance: Any) -> list[str]:
    now = [0.0]
    lanes = [Lane("a"), Lane("b", 5.0), Lane("c", 50.0)]
    queue = queues.LanedQueue(lambda waiter: waiter.lane, lambda: now[0])
    expected: list[tuple[float, Waiter]] = []
    for name in range(60):
        now[0] += chance.random() * 4
        waiter = Waiter(name, chance.choice(lanes))
        queue.add_request(waiter)
        expected.append((now[0] + waiter.lane.delay, waiter))
        expected.sort(key=lambda entry: entry[0])
        if expected and chance.random() < 0.5:
            skipped = [queue.pop_request() for _ in range(chance.randrange(len(queue)))]
            queue.prepend_requests(reversed(skipped))
        if expected and chance.random() < 0.3:
            gone = chance.choice(expected)
            expected.remove(gone)
            queue.remove_request(gone[1])
        if expected and chance.random() < 0.2:
            victim = queue.pop_request()
            expected.remove(next(entry for entry in expected if entry[1] is victim))
        if list(queue) != [entry[1] for entry in expected] or len(queue) != len(expected):
            return [f"after {name}: {[waiter.request_id for waiter in queue]}"]
    return []


def _composed(name: str) -> Any:
    from schedloom.adapters.engine.scheduler import composed
    from tests.adapters.engine.harness import stock_class

    return composed(stock_class(False), compose([PolicyChoice(name=name)]))


def _calls(owner: Any, method: str) -> list[Any]:
    calls: list[Any] = []
    original: Callable[..., Any] = getattr(owner, method)

    def recorded(*arguments: Any) -> Any:
        calls.append(arguments)
        return original(*arguments)

    setattr(owner, method, recorded)
    return calls
