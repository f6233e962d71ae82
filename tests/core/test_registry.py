"""C2: policies are found through entry points, built-in ones like anybody else's."""

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import schedloom
from schedloom import Policy
from schedloom.core.errors import ConfigurationError
from schedloom.core.policy import API
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


@pytest.fixture
def importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Registry]:
    """A registry with one policy, whose module has the given source."""

    def registry(source: str) -> Registry:
        module = f"module_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{module}.py").write_text(source)
        return Registry([point("x", f"{module}:X")])

    monkeypatch.syspath_prepend(str(tmp_path))
    return registry


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("import no_such_module", r"the module 'no_such_module' is not installed; install the package again"),
        ("from schedloom.core.later import Y", r"No module named 'schedloom\.core\.later'; install a release of it"),
        (
            "from schedloom import Y",
            r"cannot import name 'Y' from 'schedloom'.*; install a release of it that was made",
        ),
        ("1 / 0", r"ZeroDivisionError: division by zero"),
        ("", r"AttributeError: module .* has no attribute 'X'"),
        ("raise SystemExit(3)", r"SystemExit: 3"),
    ],
)
def test_a_policy_that_cannot_be_imported_is_named(
    importing: Callable[[str], Registry], source: str, sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf"policy 'x' of .*:X\) cannot be imported: {sentence}"):
        importing(source).load("x")


def test_a_policy_for_newer_hooks_is_refused(importing: Callable[[str], Registry]) -> None:
    source = f"import schedloom\nclass X(schedloom.Policy):\n    name = 'x'\n    api = {API + 1}"
    sentence = f"'x' of .* was written for version {API + 1} of the hooks and this schedloom has version {API}"
    with pytest.raises(ConfigurationError, match=sentence):
        importing(source).load("x")


def test_settings_that_take_anything_are_refused(importing: Callable[[str], Registry]) -> None:
    source = "import pydantic, schedloom\nclass X(schedloom.Policy):\n    name = 'x'\n    Settings = pydantic.BaseModel"
    with pytest.raises(ConfigurationError, match=r"'x' of .* takes any setting.*schedloom\.PolicySettings"):
        importing(source).load("x")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("Settings = dict", r"Settings must be a subclass of PolicySettings, not <class 'dict'>"),
        ("Settings = schedloom.PolicySettings()", r"Settings must be a subclass of PolicySettings, not PolicySettings"),
        ("api = '1'", r"api must be a whole number, not '1'"),
        ("api = None", r"api must be a whole number, not None"),
        ("requires = {'decoder': True}", r"requires must be Requirements, not {'decoder': True}"),
        ("claims = None", r"claims must be Claims, not None"),
    ],
)
def test_a_policy_whose_attributes_do_not_fit_is_named(
    importing: Callable[[str], Registry], line: str, sentence: str
) -> None:
    source = f"import schedloom\nclass X(schedloom.Policy):\n    name = 'x'\n    {line}"
    with pytest.raises(ConfigurationError, match=rf"policy 'x' of .*:X\): {sentence}"):
        importing(source).load("x")


def test_a_policy_knows_who_brought_it() -> None:
    assert Registry().package("append_prefill") == f"schedloom {schedloom.__version__}"
    assert Registry().is_built_in("append_prefill")
    assert not Registry([point("x", "a:A")]).is_built_in("x")


def test_an_entry_point_that_is_no_policy_is_refused() -> None:
    registry = Registry([point("x", "collections:OrderedDict")])
    with pytest.raises(ConfigurationError, match=r"must name a subclass of schedloom\.Policy"):
        registry.load("x")


def test_a_policy_under_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = point("x", "anything:X")
    monkeypatch.setattr(EntryPoint, "load", lambda self: Misnamed)
    with pytest.raises(ConfigurationError, match="registered as 'x' but calls itself 'another'"):
        Registry([entry]).load("x")
