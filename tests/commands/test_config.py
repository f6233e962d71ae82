"""C3: a configuration file is checked as strictly as a start would check it, and explained."""

import json
import re
import sys
import textwrap
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from schedloom import __version__
from schedloom.cli import app
from schedloom.commands import documents
from schedloom.commands.schema import json_schema
from schedloom.core.errors import ConfigurationError
from schedloom.core.hooks import Side
from schedloom.core.registry import GROUP, Registry
from tests.commands.conftest import Command

ROUTER = "workers:\n- url: http://127.0.0.1:8100\n  role: prefill\n- url: http://127.0.0.1:8200\n  role: decode\n"
ENGINE = "policies:\n- name: append_prefill\n  max_append_tokens: 5\n"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (f"kind: engine\n{ENGINE}", "fits the engine; policies on: append_prefill"),
        ("scheduler_config: {decoder_append_prefill_enable: true}", "fits the engine; policies on: append_prefill"),
        ("decoder_append_prefill_enable: false", "fits the engine; policies on: none"),
        ('{"additional_config": {"scheduler_config": {"policies": []}, "other": 1}}', "fits the engine"),
        ('{\n\t"scheduler_config": {\n\t\t"policies": []\n\t}\n}', "fits the engine; policies on: none"),
        ('{"kind": "engine", "policies": [{"name": "append_prefill", "max_append_tokens": 1e3}]}', "append_prefill"),
        ("a: &a {name: kv_lease}\nscheduler_config: {policies: [{<<: *a, ttl_seconds: 5}]}", "policies on: kv_lease"),
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
DIGITS = "1" * 5000
DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("kind: engin\npolicies: []", "kind is 'engin'; did you mean 'engine'?"),
        ("policies: []", "may be for either side; say which in a key kind: engine or router"),
        ("scheduler_confg: {}", "key 'scheduler_confg': did you mean 'scheduler_config'"),
        ("- a", "must hold a mapping at its top level"),
        ("a: [", "is neither YAML nor JSON"),
        ("kind: engine\npolicies: []\npolicies: []", "key 'policies' stands twice"),
        ("kind: router\nworkers: &all [*all]", "is neither YAML nor JSON: found unconstructable recursive node"),
        ("kind: router\nport: 1\nhost: h\nport: 2", "key 'port' stands twice, again in line 4"),
        (f"{ROUTER}wait: 5", "unknown key 'wait'; did you mean 'start_wait_seconds'?"),
        ('{"kind": "engine",\n\t"policies": [],\n\t"policies": []}', "key 'policies' stands twice"),
        ('additional_config: \'{"a": 1, "a": 2}\'', "key 'a' stands twice"),
        ("additional_config: {}\nadditional-config: {}", "additional-config stands there as additional_config too"),
        (f"kind: engine\npolicies: {DIGITS}", "is neither YAML nor JSON: Exceeds the limit"),
        (f"kind: engine\npolicies: {DEEP}", "is neither YAML nor JSON: "),
        ("kind: engine\npolicies: 2026-13-45", "is neither YAML nor JSON: month must be in 1..12"),
        ("kind: engine\npolices: []", f"unknown key '{SECTION}.polices'; did you mean 'policies'?"),
        ("scheduler_config:", f"{SECTION}: must be a mapping"),
        ("additional_config: {}", "additional_config has no scheduler_config"),
        (
            "additional_config: {scheduler_config: {policies: []}, decoder_append_prefill_enable: true}",
            "unknown key 'additional_config.decoder_append_prefill_enable'; write it inside scheduler_config",
        ),
        (
            "kind: engine\npolicies: [{name: batch_job_aware, job_classes: []}]",
            "job_classes: must have at least 1 item",
        ),
        ("kind: engine\npolicies: [{name: batch_job_aware, job_classes: b}]", "job_classes: must be a list; write ["),
        (
            "kind: engine\npolicies: [{name: phase_separation, decode_batch_buckets: 4}]",
            "buckets: must be a list; write [",
        ),
        ("additional_config: '{'", "additional_config is no JSON"),
        (f"kind: engine\n{ENGINE}- name: tpot_gard", f"{SECTION}.policies[1]: there is no policy named 'tpot_gard'"),
        (
            "kind: engine\npolicies: [{name: tpot_guard}, {name: append_prefill, max_apend_tokens: 5}]",
            f"unknown key '{SECTION}.policies[1].max_apend_tokens'; did you mean 'max_append_tokens'?",
        ),
        ("kind: engine\npolicies: [{name: session_owner}]", "'session_owner' has no hook that the engine calls"),
        ("kind: router\nworkers: [{ulr: a}]", "unknown key 'workers[0].ulr'; did you mean 'url'?"),
        (
            "kind: engine\npolicies: [append_prefill]",
            f'{SECTION}.policies[0]: must be a mapping; write {{"name": "append_',
        ),
        ("kind: engine\npolicies: {append_prefill: {}}", f"{SECTION}.policies: must be a list"),
        ("workers: ['http://h:1']", 'workers[0]: must be a mapping; write {"url": "http://h:1"}, or with more, {"url"'),
        (
            "kind: engine\npolicies: append_prefill",
            f'{SECTION}.policies: must be a list of mappings with name; write [{{"name": "append_prefill"}}]',
        ),
        (
            "kind: engine\npolicies: [{name: tpot_guard, min_chunk_tokens: yes}]",
            f"{SECTION}.policies[0].min_chunk_tokens: must be a number, not True",
        ),
        ("kind: engine\npolicies: [{name: tpot_guard, tpot_ms: .inf}]", "tpot_ms: must be a finite number, not inf"),
        ('{"kind": "engine", "policies": [{"name": "kv_lease", "ttl_seconds": 1e999}]}', "must be a finite number"),
        (f"{ROUTER}max_in_flight: yes", "max_in_flight: must be a number, not True"),
        (f"{ROUTER}request_timeout_seconds: .nan", "request_timeout_seconds: must be a finite number, not nan"),
        (f"{ROUTER}forward_authorization: 1", "forward_authorization: must be true or false, not 1"),
        (f"{ROUTER}api_keys:\n- {{key: a, key: b, tenant: t}}", "key 'key' stands twice"),
        ("workers: []", "workers: must have at least 1 item"),
        (f"{ROUTER}api_keys: [{{key: short, tenant: t}}]", "api_keys[0].key: must have at least 8 characters"),
        ("transfer_peers: ['10.0.0.1:99999']", "'10.0.0.1:99999' has port 99999, and ports end at 65535"),
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


VLLM_FILE = """
model: m
kv-transfer-config: {transfer}
additional-config: {{scheduler_config: {{{section}}}}}
"""
DECODER = "{kv_connector: NixlConnector, kv_role: kv_consumer}"
PREFILLER = "{kv_connector: NixlConnector, kv_role: kv_producer}"
APPEND = "decoder_append_prefill_enable: true"
OFFLOAD = "policies: [{name: offload_restore}]"


def vllm_file(transfer: str, section: str, *options: str) -> str:
    return "\n".join((VLLM_FILE.format(transfer=transfer, section=section), *options))


def saving(extra: str) -> str:
    return f"{{kv_connector: PreemptOffloadConnector, kv_role: kv_both, kv_connector_extra_config: {extra}}}"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (vllm_file(PREFILLER, APPEND), "policy 'append_prefill' runs on Decoders only"),
        (vllm_file('\'{"kv_connector": "x", "kv_role": "kv_producer"}\'', APPEND), "runs on Decoders only"),
        (vllm_file("null", APPEND), "this engine's KV role is 'none'"),
        (vllm_file("'{'", APPEND), "kv_transfer_config is no JSON"),
        (vllm_file("[a]", APPEND), "kv_transfer_config must be a mapping"),
        (
            vllm_file("{kv_connector: x, kv_connector_extra_config: {connectors: [a]}}", APPEND),
            "connectors must each be",
        ),
        (vllm_file(DECODER, APPEND, "no_enable_prefix_caching: true"), "needs the prefix cache"),
        (vllm_file(DECODER, APPEND, "enable-prefix-caching: false"), "needs the prefix cache"),
        (vllm_file(DECODER, "policies: [{name: tpot_guard}]", "no-enable-chunked-prefill: true"), "cuts prompts"),
        (vllm_file(DECODER, OFFLOAD), "needs a KV connector that saves preempted requests"),
        (vllm_file(saving("{}"), OFFLOAD), "kv_connector_extra_config.host_bytes is missing"),
        (
            vllm_file(DECODER, "policies: [{name: short_request_first}]", "scheduling-policy: priority"),
            "and --scheduling-policy priority both decide the order of the waiting queue",
        ),
    ],
)
def test_an_engines_file_is_refused_for_what_a_start_refuses(schedloom: Command, text: str, sentence: str) -> None:
    Path("file").write_text(text)
    ended = schedloom("config", "validate", "file")
    assert ended.status == 1 and ended.err.startswith("schedloom: file: ") and sentence in ended.err, ended


@pytest.mark.parametrize(
    ("text", "unchecked"),
    [
        (vllm_file(DECODER, APPEND), None),
        (vllm_file(saving("{host_bytes: 1GiB}"), OFFLOAD), None),
        (f"model: m\nadditional-config: {{scheduler_config: {{{APPEND}}}}}", "'append_prefill' needs (decoder)"),
        (APPEND, "'append_prefill' needs (decoder, prefix_caching)"),
        (OFFLOAD, "'offload_restore' needs (preempted_kv)"),
        ("kind: engine\npolicies: [{name: kv_lease}]", "'kv_lease' needs (prefix_caching)"),
        ("kind: engine\npolicies: [{name: short_request_first}]", None),
    ],
)
def test_what_a_file_cannot_show_is_said(schedloom: Command, text: str, unchecked: str | None) -> None:
    Path("file").write_text(text)
    ended = schedloom("config", "validate", "file")
    assert (ended.status, ended.err) == (0, "")
    assert len(ended.out.splitlines()) == (2 if unchecked else 1)
    assert unchecked is None or f"not checked: whether the engine has what policy {unchecked}" in ended.out
    assert unchecked is None or unchecked in schedloom("explain", "file").out


def test_a_scheduler_class_of_the_users_is_said_to_be_unseen(schedloom: Command) -> None:
    Path("file").write_text(vllm_file(DECODER, APPEND, "scheduler-cls: a.Scheduler"))
    ended = schedloom("config", "validate", "file")
    assert ended.status == 0
    assert "not checked: whether a.Scheduler sets schedloom_composable = True, without which policies" in ended.out


DECLARED = "{role: consumer, models: [m], block_size: 16}"


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("workers: [{url: 'http://h:1', role: prefill}]", ["no Decoder is configured; name one with --decode URL"]),
        ("workers: [{url: 'http://h:1', role: decode}]", ["no Prefiller is configured"]),
        (
            f"workers: [{{url: 'http://h:1', role: prefill, contract: {DECLARED}}}]",
            ["no Decoder", "its KV role is con"],
        ),
        (
            f"{ROUTER}- {{url: 'http://h:2', contract: {DECLARED}}}\nenable_decoder_append_prefill: true",
            ["enabled by enable_decoder_append_prefill, but", "declare features: [append_prefill]"],
        ),
        (
            f"{ROUTER}- {{url: 'http://h:2', contract: {DECLARED}}}\npolicies: [{{name: session_owner}}]",
            ["enabled by the policy session_owner, but", "or the router without the policy session_owner"],
        ),
        (
            f"workers: [{{url: 'http://h:1', contract: {DECLARED}}}, {{url: 'http://h:2', contract: {DECLARED}}}]",
            ["none of the engines can be a Prefiller; name one that can"],
        ),
        (
            "workers: [{url: 'http://h:1', role: prefill}, {url: 'http://h:2', role: decode, drain: true}]",
            ["every Decoder that is there drains; take drain away from one of them"],
        ),
        (f"{ROUTER}- {{url: 'http://h:2', name: decoder-7}}", ["workers[2].name: 'decoder-7' is of the form"]),
        (
            "workers: [{url: 'http://h:1', name: a}, {url: 'http://h:2', name: a}]",
            ["workers: a is the name of two engines; give each one of its own"],
        ),
        (
            "policies: [{name: prefix_aware}, {name: kv_residency}, {name: prefill_cost}, {name: round_robin}]",
            [
                "'kv_residency' and 'prefill_cost'",
                "'kv_residency' and 'prefix_aware'",
                "'prefill_cost' and 'round_robin'",
            ],
        ),
        (
            "workers: 5\nport: a\npolicies: [{name: prefix_aware}, {name: kv_residency}, 5, {name: x}]",
            ["workers: must be a list", "port: must", "'kv_residency' and 'prefix_aware'", "policies[3]: there is no"],
        ),
    ],
)
def test_a_routers_file_is_refused_for_what_a_start_refuses(
    schedloom: Command, text: str, sentences: list[str]
) -> None:
    Path("file").write_text(text)
    ended = schedloom("config", "validate", "file")
    assert ended.status == 1 and all(sentence in ended.err for sentence in sentences), ended.err


PRODUCER = "role: producer, models: [m], block_size: 16"


@pytest.mark.parametrize(
    ("worker", "told"),
    [
        (f"contract: {{{PRODUCER}}}", True),
        (f"role: prefill, contract: {{{PRODUCER}}}", True),
        (f"contract: {{{PRODUCER}, kv_lease_seconds: 30}}", False),
        (f"role: decode, contract: {{{PRODUCER.replace('producer', 'both')}}}", False),
        (f"contract: {{{PRODUCER}, kv_connector: MooncakeLayerwiseConnector}}", False),
        (f"contract: {DECLARED}", False),
        ("role: prefill", False),
    ],
)
def test_a_lease_that_nobody_tells_is_said_to_be_unseen(schedloom: Command, worker: str, told: bool) -> None:
    Path("file").write_text(f"{ROUTER}- {{url: 'http://h:3', {worker}}}")
    ended = schedloom("config", "validate", "file")
    assert (ended.status, ended.err) == (0, "")
    assert ("file: not checked: whether http://h:3 keeps KV for a Decoder for handoff" in ended.out) is told


def test_every_misfit_of_a_fleet_is_told(schedloom: Command) -> None:
    leased = f"contract: {{{PRODUCER}, kv_lease_seconds: 5}}"
    another = f"contract: {DECLARED.replace('[m]', '[another]').replace('16', '32')}"
    engines = [f"contract: {DECLARED}", leased, another]
    workers = "".join(f"- {{url: 'http://h:{place}', {engine}}}\n" for place, engine in enumerate(engines))
    Path("file").write_text(f"workers:\n{workers}")
    told = schedloom("config", "validate", "file").err.splitlines()
    assert [re.findall(r"workers\[(\d)\]|$", line)[0] for line in told] == ["1", "2", "2"]
    words = ["for 5 s only", "serves another, but", "has KV blocks of 32"]
    assert all(word in line for word, line in zip(words, told, strict=True))


@pytest.mark.parametrize(
    ("text", "module", "sentence"),
    [
        ("session_store: redis://h:1", "redis.asyncio", "what session_store needs where the router runs"),
        ("policies: [{name: kv_residency}]", "zmq", "what policy kv_residency needs"),
    ],
)
def test_an_extra_that_a_start_would_need_is_told(
    schedloom: Command, monkeypatch: pytest.MonkeyPatch, text: str, module: str, sentence: str
) -> None:
    Path("file").write_text(ROUTER + text)
    assert "not installed here" not in schedloom("config", "validate", "file").out
    monkeypatch.setitem(sys.modules, module, None)
    ended = schedloom("config", "validate", "file")
    assert ended.status == 0 and "file: not installed here: " in ended.out and sentence in ended.out


def test_engines_of_a_router_may_be_named_by_options(schedloom: Command) -> None:
    Path("file").write_text("policies: [{name: session_owner}]")
    ended = schedloom("config", "validate", "file")
    assert ended.out.startswith("file: fits the router; policies on: session_owner\n") and not ended.status
    assert "it names no workers: name all engines with --prefill URL and --decode URL" in ended.out


@pytest.mark.parametrize("name", ["append_prefill", "session_owner"])
def test_policies_of_one_side_tell_whose_file_it_is(schedloom: Command, name: str) -> None:
    Path("file").write_text(f"policies: [{{name: {name}}}]")
    side = "engine" if name == "append_prefill" else "router"
    assert f"fits the {side}" in schedloom("config", "validate", "file").out


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model: m\nport: 8000", "is vLLM's own file without scheduler_config under additional-config"),
        ("kind: engine\nmodel: m", "is vLLM's own file"),
        ("tensor-parallel-size: 2\naditional-config: {}", "key 'aditional-config': did you mean 'additional-config'?"),
        ("additional-config: {scheduler_confg: {}}", "key 'scheduler_confg': did you mean 'scheduler_config'?"),
        ("policies: [{name: append_prefill}, {name: session_owner}]", "may be for either side"),
    ],
)
def test_the_wrong_kind_of_file_is_told_in_one_sentence(schedloom: Command, text: str, sentence: str) -> None:
    Path("file").write_text(text)
    ended = schedloom("config", "validate", "file")
    assert ended.status == 1 and sentence in ended.err and len(ended.err.splitlines()) == 1, ended.err


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
    assert (ended.status, json.loads(ended.out)["refused"], ended.err) == (
        1,
        [sentence],
        f"schedloom: file: {sentence}\n",
    )


def test_explain_tells_refusals_before_anything_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kind: engine\npolicies: [{name: short_request_first}, {name: batch_job_aware}]")
    first = CliRunner().invoke(app, ["explain", str(file)]).output.splitlines()[0]
    assert first.startswith(f"schedloom: {file}: policies 'batch_job_aware' and 'short_request_first' cannot be")


@pytest.mark.parametrize(
    ("text", "switch"),
    [
        ("kind: engine\npolicies: [{name: append_prefill}]", "decoder_append_prefill_enable"),
        ("kind: engine\nrecompute_scheduler_enable: true", "recompute_scheduler_enable"),
        (f"{ROUTER}policies: [{{name: session_owner}}]", "enable_decoder_append_prefill"),
    ],
)
def test_explain_shows_a_switch_on_where_its_policy_is(schedloom: Command, text: str, switch: str) -> None:
    Path("file").write_text(text)
    configuration = json.loads(schedloom("explain", "file", "--json").out)["configuration"]
    assert configuration[switch] is True and len(configuration["policies"]) == 1


PAGES = Path(__file__).parents[2] / "docs" / "router"
BLOCKS = [
    block
    for page in sorted(PAGES.glob("*.md"))
    for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", page.read_text(encoding="utf-8"), re.MULTILINE)
    if re.match(r"\s*[a-z_]+:(\s|$)", block)
]


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_the_configurations_of_the_routers_pages_fit_as_they_stand(schedloom: Command, block: str) -> None:
    Path("file").write_text(textwrap.dedent(block))
    ended = schedloom("config", "validate", "file")
    assert (ended.status, ended.err) == (0, "")


def test_the_routers_pages_have_configurations() -> None:
    assert len(BLOCKS) >= 4


def test_explain_keeps_secrets(schedloom: Command) -> None:
    Path("file").write_text(f"{ROUTER}engine_api_key: swordfish\n")
    for options in ([], ["--json"]):
        assert "swordfish" not in schedloom("explain", "file", *options).out


@pytest.mark.parametrize(
    "setting",
    [
        "session_store: redis://user:swordfish@127.0.0.1:6379/0",
        "session_store: redis://:swordfish@127.0.0.1:6379",
        "session_store: 'unix:///run/valkey.sock?db=1&password=swordfish'",
        "traces: {endpoint: 'https://swordfish@h:4318/v1/traces'}",
        "traces: {endpoint: 'ftp://user:swordfish@h:4318'}",
        "callback_url: http://user:swordfish@h:1",
        "callback_url: http://user:swordfish@h:99999",
        "session_store: redis://user:swordfish/@h",
        "session_store: swordfish@h",
    ],
)
@pytest.mark.parametrize("command", [("explain",), ("explain", "--json"), ("config", "validate")])
def test_no_password_of_an_address_is_shown(schedloom: Command, setting: str, command: tuple[str, ...]) -> None:
    Path("file").write_text(f"{ROUTER}{setting}\n")
    ended = schedloom(*command, "file")
    assert "swordfish" not in ended.out + ended.err


def test_an_address_is_shown_but_for_its_password(schedloom: Command) -> None:
    Path("file").write_text(f"{ROUTER}session_store: redis://user:swordfish@127.0.0.1:6379/0\n")
    shown = json.loads(schedloom("explain", "file", "--json").out)["configuration"]["session_store"]
    assert shown == "redis://user:**********@127.0.0.1:6379/0"


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


@pytest.mark.parametrize("side", ["engine", "router"])
def test_the_schemas_say_what_every_setting_means(side: Side) -> None:
    schema = json_schema(side, built_in())
    models = {side: schema, **schema["$defs"]}
    settings = [(name, key, about) for name, it in models.items() for key, about in it.get("properties", {}).items()]
    assert len(settings) > 20
    assert [(name, key) for name, key, about in settings if len(about.get("description", "")) < 10] == []


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
