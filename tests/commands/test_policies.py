"""C2: what is installed can be looked up."""

from importlib.metadata import EntryPoint

import pytest

from schedloom import Policy
from schedloom.core import registry
from schedloom.core.registry import GROUP, Registry
from tests.commands.conftest import Command


def test_the_list_names_every_policy_its_hooks_and_who_brought_it(schedloom: Command) -> None:
    ended = schedloom("policies")
    assert ended.status == 0
    lines = {line.split()[0]: " ".join(line.split()) for line in ended.out.splitlines()}
    assert lines["append_prefill"] == "append_prefill engine admit, screen schedloom 0.1.0 (built in)"
    assert lines["session_owner"].startswith("session_owner router plan_route")
    assert set(Registry().names()) <= lines.keys()


@pytest.mark.parametrize("name", Registry().names())
def test_one_policy_is_shown_with_its_settings_and_readme(schedloom: Command, name: str) -> None:
    ended = schedloom("policies", name)
    assert ended.status == 0
    assert f"{name} - schedloom" in ended.out and "Fails how" in ended.out
    for key in Registry().load(name).Settings.model_fields:
        (line,) = (line for line in ended.out.splitlines() if line.startswith(f"{key} "))
        assert len(line.split()) > 4, f"{key} has no description"
    claims = " ".join(ended.out.split())
    assert ("needs decoder, prefix_caching" in claims) is (name == "append_prefill")
    assert ("decides alone the order" in claims) is (name in {"batch_job_aware", "short_request_first"})


def test_an_unknown_policy(schedloom: Command) -> None:
    ended = schedloom("policies", "append_prefil")
    assert ended.status == 1
    assert ended.err == "schedloom: there is no policy named 'append_prefil'; did you mean 'append_prefill'?\n"


class Idle(Policy):
    name = "idle"


def test_a_broken_policy_does_not_hide_the_others(schedloom: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("idle", f"{__name__}:Idle", GROUP),
        EntryPoint("gone", "no_such_module:X", GROUP),
        EntryPoint("append_prefill", "schedloom.policies.append_prefill:AppendPrefill", GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    ended = schedloom("policies")
    assert ended.status == 1 and "append_prefill" in ended.out
    gone, idle = ended.err.splitlines()
    assert "'gone' of an unnamed package (no_such_module:X) cannot be imported" in gone
    assert "'idle': it implements no hook" in idle
