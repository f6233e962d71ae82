"""C3: a configuration file is checked as strictly as a start would check it, and explained."""

import json
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from schedloom import __version__
from schedloom.commands import documents
from schedloom.commands.schema import json_schema
from schedloom.core.errors import ConfigurationError
from schedloom.core.hooks import Side
from schedloom.core.registry import GROUP, Registry
from tests.commands.conftest import Command

ROUTER = "workers:\n- url: http://127.0.0.1:8100\n  role: prefill\n"
ENGINE = "policies:\n- name: append_prefill\n  max_append_tokens: 5\n"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (f"kind: engine\n{ENGINE}", "fits the engine; policies on: append_prefill"),
        ("scheduler_config: {decoder_append_prefill_enable: true}", "fits the engine; policies on: append_prefill"),
        ("decoder_append_prefill_enable: false", "fits the engine; policies on: none"),
        ('{"additional_config": {"scheduler_config": {"policies": []}, "other": 1}}', "fits the engine"),
        ("port: 8000\nadditional-config: {scheduler_config: {policies: []}}", "fits the engine"),
        ('model: m\nadditional-config: \'{"scheduler_config": {"policies": []}}\'', "fits the engine"),
        (ROUTER, "fits the router; policies on: none"),
        (f"kind: router\nenable_decoder_append_prefill: true\n{ROUTER}", "policies on: session_owner"),
    ],
)
def test_what_fits(schedloom: Command, text: str, verdict: str) -> None:
    Path("file").write_text(text)
    ended = schedloom("config", "validate", "file")
    assert (ended.status, ended.err) == (0, "") and verdict in ended.out


SECTION = "additional_config.scheduler_config"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("kind: engin\npolicies: []", "kind is 'engin'; did you mean 'engine'?"),
        ("policies: []", "may be for either side; say which in a key kind: engine or router"),
        ("scheduler_confg: {}", "key 'scheduler_confg': did you mean 'scheduler_config'"),
        ("- a", "must hold a mapping at its top level"),
        ("a: [", "is neither YAML nor JSON"),
        ("kind: engine\npolicies: []\npolicies: []", "key 'policies' stands twice"),
        ("kind: engine\npolices: []", f"unknown key '{SECTION}.polices'; did you mean 'policies'?"),
        ("scheduler_config:", f"{SECTION}: must be a valid dictionary"),
        ("additional_config: {}", "additional_config has no scheduler_config"),
        ("additional_config: '{'", "additional_config is no JSON"),
        (f"kind: engine\n{ENGINE}- name: tpot_gard", f"{SECTION}.policies[1]: there is no policy named 'tpot_gard'"),
        (
            "kind: engine\npolicies: [{name: tpot_guard}, {name: append_prefill, max_apend_tokens: 5}]",
            f"unknown key '{SECTION}.policies[1].max_apend_tokens'; did you mean 'max_append_tokens'?",
        ),
        ("kind: engine\npolicies: [{name: session_owner}]", "'session_owner' has no hook that the engine calls"),
        ("kind: router\nworkers: [{ulr: a}]", "unknown key 'workers[0].ulr'; did you mean 'url'?"),
        (f"{ROUTER}policies: [{{name: session_owner, a: 1}}]", "unknown key 'policies[0].a'; known are: max_lead"),
    ],
)
@pytest.mark.parametrize("command", [("config", "validate"), ("explain",)])
def test_what_does_not_fit(schedloom: Command, command: tuple[str, ...], text: str, sentence: str) -> None:
    Path("file").write_text(text)
    ended = schedloom(*command, "file")
    assert ended.status == 1
    assert any(sentence in line for line in ended.err.splitlines()), ended.err
    assert all(line.startswith("schedloom: ") for line in ended.err.splitlines()), ended.err


def test_every_complaint_is_told(schedloom: Command) -> None:
    Path("file").write_text("kind: engine\npolicies: [{name: x}, {name: session_owner}]")
    ended = schedloom("config", "validate", "file")
    assert (ended.status, len(ended.err.splitlines()), ended.out) == (1, 2, "")


def test_every_key_and_setting_that_does_not_fit_is_told(schedloom: Command) -> None:
    Path("file").write_text("kind: router\nworkers: [{url: x}, {ulr: y}]\nport: 0.5\n")
    told = schedloom("config", "validate", "file").err
    assert len(told.splitlines()) == 4, told
    assert all(place in told for place in ("workers[1].ulr", "workers[0].url", "workers[1].url", "port"))
    Path("file").write_text("kind: engine\npolicies: [{name: append_prefill, max_append_tokens: 0, a: 1}]")
    ended = schedloom("explain", "file")
    assert len(ended.err.splitlines()) == 2 and ended.out == "", ended


def test_the_version(schedloom: Command) -> None:
    assert schedloom("--version").out == f"schedloom {__version__}\n"


def test_a_missing_file_and_a_missing_argument(schedloom: Command) -> None:
    assert (
        schedloom("config", "validate", "nowhere").err
        == "schedloom: nowhere cannot be read: No such file or directory\n"
    )
    assert schedloom("config", "validate").status == 2


def test_explain_shows_defaults_hooks_and_who_supplies_them(schedloom: Command) -> None:
    Path("file").write_text(f"kind: engine\n{ENGINE}- name: tpot_guard\n")
    facts = json.loads(schedloom("explain", "file", "--json").out)
    first = facts["configuration"]["policies"][0]
    assert first == {"name": "append_prefill", "min_reused_tokens": 128, "max_append_tokens": 5}
    assert facts["hooks"]["admit"] == ["append_prefill"] and facts["hooks"]["limit_tokens"] == ["tpot_guard"]
    assert "plan_route" not in facts["hooks"] and facts["refused"] == []
    assert facts["policies"]["append_prefill"]["needs"] == ["decoder", "prefix_caching"]
    shown = schedloom("explain", "file").out
    assert "max_append_tokens: 5" in shown and "limit_tokens" in shown


def test_explain_tells_what_is_refused_and_why(schedloom: Command) -> None:
    Path("file").write_text("kind: engine\npolicies: [{name: short_request_first}, {name: batch_job_aware}]")
    ended = schedloom("explain", "--json", "file")
    sentence = (
        "policies 'batch_job_aware' and 'short_request_first' cannot be on together: "
        "both decide the order of the waiting queue"
    )
    assert (ended.status, json.loads(ended.out)["refused"], ended.err) == (1, [sentence], f"schedloom: {sentence}\n")


def test_explain_keeps_secrets(schedloom: Command) -> None:
    Path("file").write_text(f"{ROUTER}engine_api_key: swordfish\n")
    for options in ([], ["--json"]):
        assert "swordfish" not in schedloom("explain", "file", *options).out


def built_in() -> Registry:
    """Only this project's policies, whatever else is installed."""
    return Registry(point for point in entry_points(group=GROUP) if point.dist and point.dist.name == "schedloom")


@pytest.mark.parametrize("side", ["engine", "router"])
def test_the_schemas_are_well_formed(side: Side) -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema(side, built_in()))


@pytest.mark.parametrize(
    ("side", "values", "fits"),
    [
        ("engine", {"policies": [{"name": "append_prefill", "max_append_tokens": 5}]}, True),
        ("engine", {"policies": [{"name": "append_prefill", "max_apend_tokens": 5}]}, False),
        ("engine", {"policies": [{"name": "append_prefill", "max_append_tokens": 0}]}, False),
        ("engine", {"policies": [{"name": "session_owner"}]}, False),
        ("engine", {"polices": []}, False),
        ("router", {"workers": [{"url": "http://h:1"}], "policies": [{"name": "session_owner"}]}, True),
        ("router", {"workers": []}, False),
    ],
)
def test_the_schemas_know_every_policys_settings(side: Side, values: Any, fits: bool) -> None:
    assert jsonschema.Draft202012Validator(json_schema(side, built_in())).is_valid(values) is fits


def test_the_command_prints_the_schema(schedloom: Command) -> None:
    assert json.loads(schedloom("config", "schema", "router").out) == json_schema("router", Registry())
    assert schedloom("config", "schema", "client").status == 2


def test_a_schema_without_policies() -> None:
    assert json_schema("engine", Registry([]))["properties"]["policies"]["items"] == {"$ref": "#/$defs/PolicyChoice"}


def test_a_policy_that_cannot_be_imported_stops_the_schema() -> None:
    with pytest.raises(ConfigurationError, match=r"'x' of .* cannot be imported"):
        json_schema("engine", Registry([EntryPoint("x", "no_such_module:X", GROUP)]))


def test_both_sides_have_a_model() -> None:
    assert sorted(documents.section_models()) == ["engine", "router"]
