"""X5: routing by the KV that engines say they hold: no futile local attempts."""

import pytest

from schedloom.core.composition import PolicyChoice, compose
from schedloom.core.errors import ConfigurationError
from schedloom.core.routing import Held, Leg, RouteRequest
from schedloom.policies.kv_residency import KvResidency
from schedloom.policies.kv_residency.policy import KvResidencySettings
from tests.policies.routing import FakeCandidate, FakeResidency, FakeView, asked, request

A, B = FakeCandidate("a"), FakeCandidate("b")
TURN = asked(session="s")
PROMPT = asked(token_ids=list(range(3000)))


def kept(held: Held | None, of: RouteRequest) -> bool:
    told = {} if held is None else {"a": held}
    view = FakeView(residency=FakeResidency(prompts=told, sessions=told))
    return KvResidency().filter_workers(of, Leg.APPEND, [A], view) == [A]


@pytest.mark.parametrize(
    ("held", "made"),
    [
        (Held(0, True), False),
        (Held(127, True), False),
        (Held(128, True), True),
        (Held(0, False), True),
        (None, True),
    ],
)
def test_no_attempt_where_a_sessions_kv_is_surely_gone(held: Held | None, made: bool) -> None:
    assert kept(held, TURN) is made


@pytest.mark.parametrize(("tokens", "made"), [(951, False), (952, True)])
def test_a_known_prompt_is_held_to_the_decoders_own_rule(tokens: int, made: bool) -> None:
    assert kept(Held(tokens, True), PROMPT) is made
    assert kept(Held(tokens, False), PROMPT)


def test_other_legs_are_not_narrowed() -> None:
    view = FakeView(residency=FakeResidency(sessions={"a": Held(0, True)}))
    for leg in (Leg.PREFILL, Leg.DECODE):
        assert KvResidency().filter_workers(TURN, leg, [A, B], view) is None


def test_the_score_is_the_share_that_is_held() -> None:
    view = FakeView(residency=FakeResidency({"a": Held(1500, True)}, {"a": Held(100, True), "b": Held(50, False)}))
    assert KvResidency().score_workers(PROMPT, [A, B], view) == [0.5, 0.0]
    assert KvResidency().score_workers(TURN, [A, B], view) == [1.0, 0.5]
    assert KvResidency().score_workers(request(), [A, B], view) is None
    assert KvResidency().score_workers(TURN, [A, B], FakeView()) is None


def test_prompts_are_tokenized_only_on_demand() -> None:
    assert KvResidency.listens
    assert not KvResidency().reads_tokens
    assert KvResidency(KvResidencySettings(tokenize=True)).reads_tokens


@pytest.mark.parametrize("guess", ["prefix_aware", "prefill_cost"])
def test_knowledge_and_a_guess_do_not_stand_together(guess: str) -> None:
    with pytest.raises(ConfigurationError, match=f"kv_residency.*{guess}.*which engine's cache"):
        compose([PolicyChoice(name="kv_residency"), PolicyChoice(name=guess)], side="router")
