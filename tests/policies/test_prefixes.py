"""B1, X8: policies that prefer engines for the prompts they have seen: prefix_aware, prefill_cost."""

from dataclasses import replace

import pytest

from schedloom.core.composition import PolicyChoice, compose
from schedloom.core.errors import ConfigurationError
from schedloom.core.routing import AttemptReport, Ending, Leg
from schedloom.policies.prefill_cost import PrefillCost
from schedloom.policies.prefix_aware import PrefixAware
from schedloom.policies.prefix_aware.policy import PrefixAwareSettings
from schedloom.policies.prefix_aware.table import MOST_PLACES, PrefixTable
from tests.policies.routing import CONTRACT, FakeCandidate, answered, asked, request

SYSTEM = bytes(range(256)) * 16
A, B = FakeCandidate("a"), FakeCandidate("b")


def test_the_score_is_the_share_of_the_prompt_that_was_seen() -> None:
    policy = PrefixAware()
    policy.attempt_finished(request(SYSTEM), answered(A))
    assert policy.score_workers(request(SYSTEM), [A, B]) == [1.0, 0.0]
    assert policy.score_workers(request(SYSTEM + b"x" * 4096), [A, B]) == [0.5, 0.0]
    assert policy.score_workers(request(b"y" + SYSTEM), [A, B]) == [0.0, 0.0]


def test_what_goes_on_from_what_an_engine_said_has_its_prefix() -> None:
    policy = PrefixAware()
    policy.attempt_finished(request(SYSTEM), answered(A))
    policy.attempt_finished(request(SYSTEM + b"x" * 2048), answered(B))
    assert policy.score_workers(request(SYSTEM + b"x" * 4096), [A, B]) == [0.5, 0.75]


def test_a_short_prompt_has_no_opinion() -> None:
    assert PrefixAware().score_workers(request(b"hello"), [A, B]) is None


@pytest.mark.parametrize("salt", ["one", None])
def test_tenants_and_models_share_no_prefix(salt: str | None) -> None:
    policy = PrefixAware()
    policy.attempt_finished(request(SYSTEM, salt=salt), answered(A))
    assert policy.score_workers(request(SYSTEM, salt="two"), [A, B]) == [0.0, 0.0]
    assert policy.score_workers(asked(model="other", prompt=SYSTEM, cache_salt=salt), [A, B]) == [0.0, 0.0]


def test_a_restarted_engine_and_another_rank_have_seen_nothing() -> None:
    policy = PrefixAware()
    policy.attempt_finished(request(SYSTEM), answered(A))
    again = FakeCandidate("a", contract=CONTRACT.model_copy(update={"epoch": "second"}))
    assert policy.score_workers(request(SYSTEM), [again, FakeCandidate("a", rank=1)]) == [0.0, 0.0]


@pytest.mark.parametrize("ending", [Ending.FAILED, Ending.FULL, Ending.LEFT])
def test_only_an_answer_teaches(ending: Ending) -> None:
    policy = PrefixAware()
    policy.attempt_finished(request(SYSTEM), AttemptReport(Leg.PREFILL, A, ending, 1.0))
    assert policy.score_workers(request(SYSTEM), [A, B]) == [0.0, 0.0]


def test_a_local_attempt_that_was_turned_away_teaches_nothing() -> None:
    policy = PrefixAware()
    report = answered(A, Leg.APPEND)
    policy.attempt_finished(request(SYSTEM), replace(report, output_tokens=0))
    assert policy.score_workers(request(SYSTEM), [A, B]) == [0.0, 0.0]
    policy.attempt_finished(request(SYSTEM), replace(report, output_tokens=7))
    assert policy.score_workers(request(SYSTEM), [A, B]) == [1.0, 0.0]


def test_a_prefix_is_not_worth_any_load() -> None:
    policy = PrefixAware(PrefixAwareSettings(max_lead=2))
    policy.attempt_finished(request(SYSTEM), answered(A))
    busy = FakeCandidate("a", in_flight=5)
    assert policy.score_workers(request(SYSTEM), [busy, FakeCandidate("b", in_flight=3)]) == [1.0, 0.0]
    assert policy.score_workers(request(SYSTEM), [busy, FakeCandidate("b", in_flight=2)]) == [0.0, 0.0]


def test_the_table_is_bounded_and_forgets_what_nobody_asks_for() -> None:
    table = PrefixTable(8)
    table.learn([1, 2, 3, 4], answered(A))
    table.learn([5, 6, 7, 8], answered(B))
    assert table.matches([1, 2, 3, 4], [A]) == [4]
    table.learn([11, 12, 13, 14], answered(B))
    assert len(table) == 8
    assert table.matches([1, 2, 3, 4], [A]) == [4]
    assert table.matches([5, 6, 7, 8], [B]) == [0]
    table.learn(range(100, 200), answered(A))
    assert len(table) == 8
    assert table.matches(range(100, 200), [A]) == [8]


def test_a_block_that_all_ask_for_forgets_engines_that_are_gone() -> None:
    table = PrefixTable(8)
    for number in range(3 * MOST_PLACES):
        table.learn([1], answered(FakeCandidate(f"engine-{number}")))
        table.learn([1], answered(A))
    assert len(table._seen[1]) <= MOST_PLACES + 1
    newest, oldest = FakeCandidate(f"engine-{3 * MOST_PLACES - 1}"), FakeCandidate("engine-0")
    assert table.matches([1], [A, newest, oldest]) == [1, 1, 0]


def test_cost_weighs_new_prefill_against_the_requests_beside_it() -> None:
    policy = PrefillCost()
    policy.attempt_finished(request(SYSTEM), answered(A))
    follow_up = request(SYSTEM + b"x" * 1024)
    busy = FakeCandidate("a", in_flight=3)
    assert policy.score_workers(follow_up, [busy, B]) == [1.0, 1024 * 4 / 5120]
    busier = FakeCandidate("a", in_flight=5)
    assert policy.score_workers(follow_up, [busier, B]) == [5120 / (1024 * 6), 1.0]


@pytest.mark.parametrize("other", ["prefix_aware", "least_tokens"])
def test_who_answers_both_questions_stands_alone_with_them(other: str) -> None:
    with pytest.raises(ConfigurationError, match="prefill_cost"):
        compose([PolicyChoice(name="prefill_cost"), PolicyChoice(name=other)], side="router")
