"""A3, A5: admission on vLLM's real schedulers, synchronous and asynchronous."""

from collections.abc import Mapping
from typing import Any

import pytest

from schedloom import Policy, hookimpl
from schedloom.adapters.engine.parts import admission
from schedloom.adapters.engine.parts.admission import RECHECK_INTERVAL_STEPS
from schedloom.adapters.engine.views import VllmRequestView
from schedloom.core.decisions import Admission, Verdict
from schedloom.core.registry import Registry
from schedloom.core.views import EngineView, RequestView
from tests.adapters.engine.conftest import Make
from tests.adapters.engine.harness import BLOCK, make_request, tokens
from tests.adapters.engine.scenarios import (
    REJECTED,
    cold_attempt,
    preempted_attempt,
    warm_attempt,
    warm_up,
)
from tests.conformance.test_composition import These


class AdmitsWithoutKV(Policy):
    """Known to be bad: it admits whatever comes."""

    name = "bad"

    @hookimpl
    def admit(self, request: RequestView) -> Admission:
        return Admission(Verdict.ADMIT)


class RejectsEverything(Policy):
    """Known to be bad: it rejects even what it must not."""

    name = "bad"

    @hookimpl
    def admit(self, request: RequestView) -> Admission:
        return Admission(Verdict.REJECT, "because")


class Raises(Policy):
    name = "bad"

    @hookimpl
    def admit(self, request: RequestView, view: EngineView) -> Admission:
        raise RuntimeError("a fault of the policy")


class OnePolicy(Registry):
    def __init__(self, policy: type[Policy]) -> None:
        super().__init__([])
        self.policies: Mapping[str, type[Policy]] = {policy.name: policy}

    def load(self, name: str) -> type[Policy]:
        return self.policies[name]


def record_calls(owner: Any, method: str) -> list[str]:
    """Ids of the requests that ``owner.method`` is called for from now on."""
    calls: list[str] = []
    original = getattr(owner, method)

    def recorded(request: Any, *rest: Any) -> Any:
        calls.append(request.request_id)
        return original(request, *rest)

    setattr(owner, method, recorded)
    return calls


def test_a_cold_attempt_is_turned_away(make: Make) -> None:
    assert cold_attempt(make("append_prefill")) == []


def test_a_warm_attempt_computes_its_suffix(make: Make) -> None:
    assert warm_attempt(make("append_prefill")) == []


def test_a_preempted_attempt_is_finished(make: Make) -> None:
    assert preempted_attempt(make("append_prefill", num_blocks=50)) == []


def test_a_policy_that_admits_without_kv_is_noticed(make: Make) -> None:
    wrong = cold_attempt(make("bad", registry=OnePolicy(AdmitsWithoutKV)))
    assert any("not turned away" in complaint for complaint in wrong)
    assert "it has output" in wrong


def test_a_policy_that_rejects_everything_is_noticed(make: Make) -> None:
    assert warm_attempt(make("bad", registry=OnePolicy(RejectsEverything))) != []


def test_rejecting_after_output_is_noticed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard against it is the framework's: without the guard, the scenario must fail."""
    monkeypatch.setattr(admission, "is_fresh", lambda request: True)
    (wrong,) = preempted_attempt(make("append_prefill", num_blocks=50))
    assert "no_usable_prefix" in wrong


def test_no_policy_can_reject_after_output(make: Make) -> None:
    """The guard holds against a policy that turns away whatever it is asked about after its first answer."""

    class RejectsLater(Policy):
        name = "bad"
        answers = 0

        @hookimpl
        def admit(self, request: RequestView) -> Admission | None:
            if not request.is_local_attempt:
                return None
            self.answers += 1
            return Admission(Verdict.ADMIT if self.answers == 1 else Verdict.REJECT, "later")

    assert preempted_attempt(make("bad", registry=OnePolicy(RejectsLater), num_blocks=50)) == []


def test_an_unmarked_request_is_never_turned_away(make: Make) -> None:
    for registry, name in ((None, "append_prefill"), (OnePolicy(RejectsEverything), "bad")):
        runner = make(name, registry=registry)
        runner.scheduler.add_request(make_request("cold", tokens(2, 300)))
        runner.drain()
        assert runner.ended["cold"] == ("length", None)


def test_a_policy_that_raises_leaves_vllms_own_behaviour(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    runner = make("bad", registry=OnePolicy(Raises))
    for name in ("one", "two"):
        runner.scheduler.add_request(make_request(name, tokens(2, 300), marked=True))
    runner.drain()
    assert runner.ended == {"one": ("length", None), "two": ("length", None)}


def test_a_hopeless_attempt_is_told_even_from_the_end_of_the_queue(make: Make) -> None:
    """The screen: nothing can run, because the one slot is taken, and the head of the queue is somebody else's."""
    runner = make("append_prefill", max_num_seqs=1)
    runner.scheduler.add_request(make_request("running", tokens(4, 50), max_tokens=400))
    runner.steps(3)
    for index in range(5):
        runner.scheduler.add_request(make_request(f"ahead {index}", tokens(5 + index, 50)))
    runner.scheduler.add_request(make_request("cold", tokens(2, 300), marked=True))
    runner.steps(runner.depth)
    assert runner.ended == {"cold": REJECTED}


def test_an_attempt_whose_kv_is_evicted_in_the_queue_is_told(make: Make) -> None:
    runner = make("append_prefill", max_num_seqs=1, num_blocks=60)
    prompt = warm_up(runner) + tokens(3, 20)
    runner.scheduler.add_request(make_request("running", tokens(4, 300), max_tokens=600))
    runner.steps(3)
    runner.scheduler.add_request(make_request("attempt", prompt, marked=True))
    runner.steps(runner.depth + 1)
    assert "attempt" not in runner.ended
    while "running" in runner.scheduler.requests and "attempt" not in runner.ended:
        runner.step()
    assert runner.ended == {"first turn": ("length", None), "attempt": REJECTED}


def test_attempts_in_the_queue_are_looked_at_in_turn_and_rarely(make: Make) -> None:
    runner = make("append_prefill", max_num_seqs=1)
    prompt = warm_up(runner) + tokens(3, 20)
    runner.scheduler.add_request(make_request("running", tokens(4, 50), max_tokens=400))
    runner.steps(3)
    for index in range(3):
        runner.scheduler.add_request(make_request(f"attempt {index}", [*prompt, index], marked=True))
    runner.step()
    looked_at = record_calls(runner.scheduler, "look_up_local_prefix")
    runner.steps(6 * RECHECK_INTERVAL_STEPS)
    assert sorted(looked_at) == sorted(f"attempt {index}" for index in range(3) for _ in range(2))


def test_an_attempt_aborted_while_it_is_being_turned_away(make: Make) -> None:
    from vllm.v1.request import RequestStatus

    runner = make("append_prefill")
    runner.scheduler.add_request(make_request("cold", tokens(2, 300), marked=True))
    runner.in_flight.append(runner.scheduler.schedule())
    runner.scheduler.finish_requests("cold", RequestStatus.FINISHED_ABORTED)
    runner.drain()
    assert "cold" not in runner.ended


def test_an_admitted_prefix_is_looked_up_once(make: Make) -> None:
    runner = make("append_prefill")
    prompt = warm_up(runner) + tokens(3, 20)
    manager = runner.scheduler.kv_cache_manager
    look_ups = record_calls(manager, "get_computed_blocks")
    runner.scheduler.add_request(make_request("warm", prompt, marked=True))
    runner.drain()
    assert look_ups == ["warm"]


def test_a_prompt_that_is_resident_as_a_whole_is_usable(make: Make) -> None:
    """vLLM computes its last block again, because it needs the state of the last token."""
    runner = make("append_prefill")
    resident = warm_up(runner)[: 26 * BLOCK]
    runner.scheduler.add_request(make_request("again", resident, marked=True))
    assert runner.step().num_scheduled_tokens == {"again": BLOCK}
    runner.drain()
    assert runner.ended["again"] == ("length", None)


def test_a_rejection_reaches_its_own_client_with_all_that_an_output_carries(make: Make) -> None:
    """Its events are in order: of a request that was never scheduled vLLM would count negative time in the queue."""
    runner = make("append_prefill")
    told: dict[int, Any] = {}
    update = runner.scheduler.update_from_output
    runner.scheduler.update_from_output = lambda *step: (outputs := update(*step), told.update(outputs))[0]
    request = make_request("cold", tokens(2, 300), marked=True)
    request.client_index, request.trace_headers = 3, {"traceparent": "abc"}
    runner.scheduler.add_request(request)
    runner.drain()
    (output,) = told[3].outputs
    assert (output.request_id, output.trace_headers) == ("cold", {"traceparent": "abc"})
    assert [event.type.name for event in output.events] == ["QUEUED", "SCHEDULED"]
    assert output.events[0].timestamp <= output.events[1].timestamp
    assert told.keys() <= {0, 3} and not any(client.outputs for number, client in told.items() if number != 3)


def test_a_rejected_request_is_no_finished_answer_to_its_connector(make: Make) -> None:
    """A P/D connector keeps the KV of a request that stopped, for a pull that here never comes."""
    from vllm.v1.request import RequestStatus

    runner = make("append_prefill")
    ended: list[RequestStatus] = []
    connector = runner.scheduler.connector
    finished = connector.request_finished
    connector.request_finished = lambda request, *rest: (ended.append(request.status), finished(request, *rest))[1]  # type: ignore[func-returns-value]
    runner.scheduler.add_request(make_request("cold", tokens(2, 300), marked=True))
    runner.drain()
    assert ended == [RequestStatus.FINISHED_ABORTED]


def test_an_older_look_up_does_not_admit(make: Make) -> None:
    runner = make("append_prefill")
    request = make_request("attempt", warm_up(runner) + tokens(3, 20), marked=True)
    assert runner.scheduler.view.reusable_kv(VllmRequestView(request)).resident > 128
    assert runner.scheduler.reset_prefix_cache()
    runner.scheduler.add_request(request)
    runner.drain()
    assert runner.ended["attempt"] == REJECTED


class PutsOff(Policy):
    """DEFER for two steps, HOLD for two, DEFER again for two, and then comes in."""

    name = "late"

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        verdicts = [Verdict.DEFER, Verdict.HOLD, Verdict.DEFER]
        self.answers = [Admission(verdict, verdict.name.lower()) for verdict in verdicts for _ in range(2)]

    @hookimpl
    def admit(self) -> Admission:
        return self.answers.pop(0) if self.answers else Admission(Verdict.ADMIT)


def test_what_is_put_off_counts_once_for_each_reason_in_a_row(make: Make) -> None:
    runner = make("late", registry=OnePolicy(PutsOff))
    runner.scheduler.add_request(make_request("r", tokens(1, 40)))
    runner.drain()
    assert runner.ended["r"] == ("length", None)
    counts = {(verdict, reason): count for (_, _, verdict, reason), count in runner.scheduler.decisions.counts.items()}
    assert counts == {("DEFER", "defer"): 2, ("HOLD", "hold"): 1, ("ADMIT", ""): 1}
    assert not runner.scheduler._put_off


class DefersOne(Policy):
    name = "one"

    @hookimpl
    def admit(self) -> Admission:
        return Admission(Verdict.DEFER, "one")


class DefersAll(Policy):
    """It is asked before or after ``DefersOne``, by its name."""

    name = "all"

    @hookimpl
    def admit(self) -> Admission:
        return Admission(Verdict.DEFER, "all", whole_lane=True)


@pytest.mark.parametrize("asked", ["all", "two"])
def test_a_whole_lane_is_put_off_whoever_is_asked_first(make: Make, asked: str) -> None:
    other = type("DefersAll", (DefersAll,), {"name": asked})
    runner = make("one", asked, registry=These(DefersOne, other))
    closed = record_calls(runner.scheduler, "close_lane")
    runner.scheduler.add_request(make_request("r", tokens(1, 40)))
    runner.steps(1)
    assert closed == ["r"]
