"""C1: a method that the framework would not call as its author expects is refused in a sentence."""

from collections.abc import Iterator
from typing import Any

import pytest

from schedloom import Policy, hookimpl
from schedloom.core.composition import PolicyChoice, compose
from schedloom.core.errors import ConfigurationError
from schedloom.core.hooks import hooks_of, specified_hooks
from tests.core.fakes import FakeRegistry


class Misspelled(Policy):
    @hookimpl
    def admitt(self, request: object) -> None: ...


class Unmarked(Policy):
    @hookimpl
    def screen(self) -> None: ...

    def admit(self, request: object, view: object) -> None: ...


class WrongParameter(Policy):
    @hookimpl
    def admit(self, requests: object) -> None: ...


class Anything(Policy):
    @hookimpl
    def admit(self, **arguments: object) -> None: ...


class Awaited(Policy):
    @hookimpl
    async def step_begin(self) -> None: ...


class Wrapper(Policy):
    @hookimpl(wrapper=True)
    def admit(self) -> Iterator[None]:
        yield


class Idle(Policy):
    """Implements nothing."""


class Renamed(Policy):
    """A hook under a name of its own, with a parameter that only its tests use."""

    @hookimpl(specname="admit")
    def decide(self, view: object, limit: int = 3) -> tuple[object, int]:
        return view, limit


def composed(policy: type[Policy]) -> Any:
    policy.name = policy.__name__.lower()
    return compose([PolicyChoice(name=policy.name)], FakeRegistry({policy.name: policy}))


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (Misspelled, "policy 'misspelled': there is no hook named 'admitt'; did you mean 'admit'?"),
        (Unmarked, "policy 'unmarked': admit() is not marked: write @hookimpl above it, or give it another name"),
        (
            WrongParameter,
            "policy 'wrongparameter': the hook admit has no parameter 'requests'; did you mean 'request'?",
        ),
        (
            Anything,
            "policy 'anything': admit() must name the parameters that it wants one by one, of request, view",
        ),
        (Awaited, "policy 'awaited': step_begin() is asynchronous, and nobody awaits it: write def without async"),
        (Wrapper, "policy 'wrapper': admit() is a hook wrapper, and policies do not wrap each other"),
        (Idle, "policy 'idle': it implements no hook, so it would do nothing; hooks are: admit, screen"),
    ],
)
def test_what_would_not_be_called_as_expected_is_refused(policy: type[Policy], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        composed(policy)
    assert str(refused.value).startswith(sentence)


def test_a_hook_may_have_another_name_and_parameters_of_its_own() -> None:
    (hook,) = composed(Renamed).of("admit")
    assert hook.call("the request", "the view") == ("the view", 3)
    assert list(hooks_of(Renamed)) == ["admit"]


def test_every_specified_hook_is_known_with_its_parameters() -> None:
    assert specified_hooks()["admit"] == ("request", "view")
    assert specified_hooks()["plan_route"] == ("request", "owner", "fleet")
