"""C1, C3: policies are composed from configuration, and what does not fit is refused in one sentence."""

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pytest

from schedloom import Policy, hookimpl
from schedloom.core.composition import PolicyChoice, compose, review
from schedloom.core.decisions import Admission, Verdict
from schedloom.core.errors import ConfigurationError
from schedloom.core.registry import GROUP, Registry
from schedloom.core.reuse import UsablePrefixRule
from tests.core.fakes import FakeRegistry


class Few(Policy):
    """Names only one of the hook's two arguments."""

    name = "few"

    @hookimpl
    def admit(self, view: object) -> Admission:
        return Admission(Verdict.REJECT, "seen", {"view": str(view)})


class Otherwise(Policy):
    """Names them in an order of its own, before a parameter that is none of the hook's."""

    name = "otherwise"

    @hookimpl
    def limit_tokens(self, tokens: int, request: object, rate: int = 2) -> int:
        assert request == "the request"
        return tokens // rate


FAKES = FakeRegistry({Few.name: Few, Otherwise.name: Otherwise})


def choice(name: str, **settings: Any) -> PolicyChoice:
    return PolicyChoice.model_validate({"name": name, **settings})


def test_a_hook_is_called_with_the_arguments_it_names() -> None:
    (hook,) = compose([choice("few")], FAKES).of("admit")
    assert hook.policy == "few"
    assert hook.call("the request", "the view").facts == {"view": "the view"}
    (hook,) = compose([choice("otherwise")], FAKES).of("limit_tokens")
    assert hook.call("the request", 8, "the view") == 4


def test_a_hook_that_nobody_implements_costs_nothing() -> None:
    assert compose([choice("few")], FAKES).of("screen") == ()
    assert compose([]).hooks == {}


def test_order_in_configuration_changes_nothing() -> None:
    one = compose([choice("session_owner"), choice("append_prefill")])
    other = compose([choice("append_prefill"), choice("session_owner")])
    assert one.names == other.names == ["append_prefill", "session_owner"]


def test_settings_reach_the_policy() -> None:
    (policy,) = compose([choice("append_prefill", max_append_tokens=77)]).policies
    assert policy.settings == UsablePrefixRule(max_append_tokens=77)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([choice("append_prefill"), choice("append_prefill")], "named 2 times"),
        (
            [choice("append_prefill", max_apend_tokens=1)],
            "unknown key 'max_apend_tokens'; did you mean 'max_append_tokens'",
        ),
        (
            [choice("append_prefill", max_append_tokens=0)],
            "max_append_tokens: must be greater than or equal to 1",
        ),
        ([choice("session_owner", anything=1)], "unknown key 'anything'; known are: max_lead"),
    ],
)
def test_unfitting_choices_are_refused(choices: list[PolicyChoice], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        compose(choices)


@pytest.mark.parametrize("error", [KeyError("boom"), TypeError("no\n argument")])
def test_a_policy_that_cannot_be_made_is_named(error: Exception) -> None:
    class Broken(Few):
        name = "broken"

        def __init__(self, settings: object) -> None:
            raise error

    sentence = rf"^here: policy 'broken' cannot be made of its settings: {type(error).__name__}: \S+( argument)?$"
    with pytest.raises(ConfigurationError, match=sentence):
        compose([choice("broken").at("here")], FakeRegistry({"broken": Broken}))


def test_what_is_wrong_is_told_with_its_place() -> None:
    with pytest.raises(ConfigurationError) as refused:
        compose([choice("append_prefill", max_apend_tokens=1).at("a.policies[1]")])
    assert str(refused.value) == (
        "policy 'append_prefill': unknown key 'a.policies[1].max_apend_tokens'; did you mean 'max_append_tokens'?"
    )
    with pytest.raises(ConfigurationError, match=r"^a\.policies\[0\]: there is no policy named 'apend_prefill'"):
        compose([choice("apend_prefill").at("a.policies[0]")])


def test_a_policy_with_nothing_to_do_on_its_side_is_refused() -> None:
    assert compose([choice("append_prefill")], side="engine").names == ["append_prefill"]
    with pytest.raises(ConfigurationError, match=r"'append_prefill' has no hook that the router calls.*for the engine"):
        compose([choice("append_prefill")], side="router")


def test_a_review_tells_everything_at_once_and_in_the_order_of_names() -> None:
    wrong = [choice("session_owner", a=1), choice("no_such"), choice("few"), choice("few")]
    found = review(wrong, Registry([*entry_points(group=GROUP), EntryPoint("few", f"{__name__}:Few", GROUP)]))
    assert [complaint.split(";")[0] for complaint in found.complaints] == [
        "policy 'few' is named 2 times",
        "there is no policy named 'no_such'",
        "policy 'session_owner': unknown key 'a'",
    ]
    assert [policy.name for policy in found.policies] == ["few"]


def test_a_rejection_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="REJECT needs a reason"):
        Admission(Verdict.REJECT)


def test_entry_points_are_not_imported_before_they_are_asked_for() -> None:
    Registry([EntryPoint("x", "no_such_module:X", "schedloom.policies")]).names()
