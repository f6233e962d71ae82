"""Which lane a request waits in, and how many batch jobs run."""

import pytest

from schedloom.core.composition import PolicyChoice, compose
from schedloom.core.decisions import Lane, Verdict
from schedloom.core.errors import ConfigurationError
from schedloom.core.views import ReusableKV
from schedloom.core.wire import JOB_CLASS_KEY, job_class
from schedloom.policies.batch_job_aware import BatchJobAware
from schedloom.policies.short_request_first import ShortRequestFirst
from tests.policies.fakes import FakeEngine, FakeRequest

LONG = Lane("long", 10.0)


@pytest.mark.parametrize(
    ("tokens", "reusable", "lane"),
    [
        (1024, ReusableKV(0, 0), None),
        (1025, ReusableKV(0, 0), LONG),
        (9000, ReusableKV(7984, 0), None),
        (9000, ReusableKV(7960, 0), LONG),
        (9000, ReusableKV(4000, 5000), None),
        (9000, ReusableKV(4000, None), LONG),
    ],
)
def test_short_is_what_is_left_to_compute(tokens: int, reusable: ReusableKV, lane: Lane | None) -> None:
    request = FakeRequest(num_prompt_tokens=tokens)
    assert ShortRequestFirst().queue_key(request, FakeEngine(reusable)) == lane


def test_a_short_prompt_is_not_even_looked_up() -> None:
    engine = FakeEngine()
    ShortRequestFirst().queue_key(FakeRequest(num_prompt_tokens=9), engine)
    assert engine.looked_up == []


@pytest.mark.parametrize("name", [None, "interactive", "batch "])
def test_interactive_requests_have_no_lane_and_no_bound(name: str | None) -> None:
    policy, request = BatchJobAware(), FakeRequest(job_class=name)
    assert policy.queue_key(request) is None
    assert policy.admit(request, FakeEngine(active=100)) is None


def test_batch_jobs_are_bounded_until_one_holds_no_kv_any_more() -> None:
    policy, job = BatchJobAware(), FakeRequest(job_class="batch")
    assert policy.queue_key(job) == Lane("batch", 300.0)
    assert policy.admit(job, FakeEngine(active=7)) is None
    answer = policy.admit(job, FakeEngine(active=8))
    assert answer is not None
    assert (answer.verdict, answer.whole_lane) == (Verdict.DEFER, True)
    assert policy.admit(job, FakeEngine(active=7)) is None, "one may have lost its KV without having ended"


@pytest.mark.parametrize("value", ["", "x" * 65, "a b", "é", 7, None, ["batch"], "batch\n"])
def test_a_malformed_class_is_none(value: object) -> None:
    assert job_class({JOB_CLASS_KEY: value}) is None


def test_a_plain_class_is_read() -> None:
    assert job_class({JOB_CLASS_KEY: "nightly-2.batch"}) == "nightly-2.batch"
    assert job_class(None) is None


@pytest.mark.parametrize("delay", [-1.0, float("inf"), float("nan")])
def test_a_lane_without_a_bound_is_refused(delay: float) -> None:
    with pytest.raises(ValueError, match="finite delay"):
        Lane("x", delay)


def test_two_orders_are_refused() -> None:
    names = ["short_request_first", "batch_job_aware"]
    for order in (names, names[::-1]):
        with pytest.raises(ConfigurationError, match="both decide the order of the waiting queue"):
            compose([PolicyChoice(name=name) for name in order])
