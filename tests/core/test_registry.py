"""C2: policies are found through entry points, built-in ones like anybody else's."""

from importlib.metadata import EntryPoint

import pytest

from schedloom import Policy
from schedloom.core.errors import ConfigurationError
from schedloom.core.registry import GROUP, Registry
from schedloom.policies.append_prefill import AppendPrefill
from schedloom.policies.session_owner import SessionOwnerRouting


class Misnamed(Policy):
    name = "another"


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, GROUP)


@pytest.mark.parametrize(
    ("name", "policy"), [("append_prefill", AppendPrefill), ("session_owner", SessionOwnerRouting)]
)
def test_built_in_policies_are_found_by_their_entry_points(name: str, policy: type[Policy]) -> None:
    assert Registry().load(name) is policy


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'append_prefill'"):
        Registry().load("append_prefil")


def test_two_packages_with_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"two installed packages register a policy named 'x'.*a:A.*b:B"):
        Registry([point("x", "a:A"), point("x", "b:B")])


def test_a_policy_that_cannot_be_imported_is_named() -> None:
    registry = Registry([point("x", "no_such_module:X")])
    with pytest.raises(ConfigurationError, match=r"policy 'x' of .*no_such_module:X.* cannot be imported"):
        registry.load("x")


def test_an_entry_point_that_is_no_policy_is_refused() -> None:
    registry = Registry([point("x", "collections:OrderedDict")])
    with pytest.raises(ConfigurationError, match=r"must name a subclass of schedloom\.Policy"):
        registry.load("x")


def test_a_policy_under_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = point("x", "anything:X")
    monkeypatch.setattr(EntryPoint, "load", lambda self: Misnamed)
    with pytest.raises(ConfigurationError, match="registered as 'x' but calls itself 'another'"):
        Registry([entry]).load("x")
