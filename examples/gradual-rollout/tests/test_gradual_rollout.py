"""The policy as an engine gets it: from its entry point, composed with another."""

from dataclasses import dataclass
from typing import Any

import pytest

from schedloom.conformance.pure import Model, examine
from schedloom.core.composition import PolicyChoice, compose
from schedloom.core.decisions import Verdict
from schedloom.core.errors import ConfigurationError


@dataclass
class Request:
    request_id: str
    is_local_attempt: bool = True


def kept(count: int, **settings: Any) -> set[int]:
    choice = PolicyChoice.model_validate({"name": "gradual_rollout", **settings})
    (admit,) = compose([choice], side="engine").of("admit")
    answers = {number: admit.call(Request(f"chatcmpl-{number}"), None) for number in range(count)}
    return {number for number, answer in answers.items() if answer.verdict is Verdict.ADMIT}


@pytest.mark.parametrize(("percent", "least", "most"), [(0, 0, 0), (10, 80, 120), (100, 1000, 1000)])
def test_about_the_configured_share_stays(percent: float, least: int, most: int) -> None:
    assert least <= len(kept(1000, percent=percent)) <= most


def test_the_draw_is_the_same_every_time_and_another_with_another_salt() -> None:
    assert kept(200, percent=50) == kept(200, percent=50)
    assert kept(200, percent=50) != kept(200, percent=50, salt="again")
    assert kept(200, percent=20) < kept(200, percent=50), "a rising share keeps those that it had"


def test_a_request_without_the_routers_mark_is_none_of_its_business() -> None:
    (admit,) = compose([PolicyChoice(name="gradual_rollout")]).of("admit")
    assert admit.call(Request("chatcmpl-1", is_local_attempt=False), None) is None


def test_screening_and_admission_agree() -> None:
    policies = compose([PolicyChoice(name="gradual_rollout")])
    (admit,), (screen,) = policies.of("admit"), policies.of("screen")
    for number in range(100):
        request = Request(f"chatcmpl-{number}")
        assert admit.call(request, None) == screen.call(request, None)


def test_it_goes_with_append_prefill() -> None:
    names = ["append_prefill", "gradual_rollout"]
    assert compose([PolicyChoice(name=name) for name in names], side="engine").names == names


def test_a_share_above_a_hundred_percent_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="less than or equal to 100"):
        kept(1, percent=101)


def test_it_keeps_what_every_policy_promises() -> None:
    for policies in (["gradual_rollout"], ["append_prefill", "gradual_rollout"]):
        found = examine(Model(tuple(policies)))
        assert found.verdict.value == "passed", (found.violations, found.missing)
