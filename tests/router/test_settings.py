from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schedloom.core.errors import ConfigurationError
from schedloom.router import logs, serve
from schedloom.router.commands import route
from schedloom.router.settings import RouterSettings, read_file, router_settings

WORKERS = [
    {"url": "http://127.0.0.1:8100", "role": "prefill"},
    {"url": "http://[::1]:8200/", "role": "decode"},
]


def declared(**changed: Any) -> dict[str, Any]:
    return {"url": "http://h:1", "contract": {"role": "consumer", "models": ["m"], "block_size": 16, **changed}}


def test_engines_are_enough() -> None:
    settings = router_settings({"workers": WORKERS})
    assert settings.host == "127.0.0.1"
    assert [worker.url for worker in settings.workers] == ["http://127.0.0.1:8100", "http://[::1]:8200"]
    assert settings.choices == [] and not settings.append_prefill


def test_an_engine_may_serve_below_a_path() -> None:
    for url in ("http://h:1/engines/a", "http://h:1/v1/a", "http://h:1/av1", "http://v1"):
        assert router_settings({"workers": [{"url": f"{url}/"}]}).workers[0].url == url


def test_the_switch_names_the_policy_and_keeps_a_named_ones_settings() -> None:
    on = router_settings({"workers": WORKERS, "enable_decoder_append_prefill": True})
    assert [choice.name for choice in on.choices] == ["session_owner"] and on.append_prefill
    named = router_settings(
        {
            "workers": WORKERS,
            "enable_decoder_append_prefill": True,
            "policies": [{"name": "session_owner", "a": 1}],
        }
    )
    assert [choice.settings for choice in named.choices] == [{"a": 1}]


def test_a_switch_that_is_off_contradicts_its_policy() -> None:
    off = {"workers": WORKERS, "enable_decoder_append_prefill": False}
    assert router_settings(off).choices == []
    with pytest.raises(ConfigurationError) as refused:
        router_settings(off | {"policies": [{"name": "session_owner"}]})
    told = "enable_decoder_append_prefill is false, but policies name 'session_owner', which it stands for"
    assert str(refused.value) == f"router configuration: {told}; drop one of the two"


def test_an_address_keeps_its_password() -> None:
    store, collector = "redis://user:swordfish@h:6379/0", "https://swordfish@h:4318/v1/traces"
    settings = router_settings({"workers": WORKERS, "session_store": store, "traces": {"endpoint": collector}})
    assert settings.session_store == store and settings.traces and settings.traces.endpoint == collector


def named(*names: str) -> list[dict[str, str]]:
    return [{"url": f"http://h:{place}", "name": name} for place, name in enumerate(names, 1)]


NO_NAMES = ("", "a b", "a\n", "-a", "a.", "\u00e4", "a" * 49, 'a"', "prefiller-12", "engine-0")


def test_engines_may_have_names() -> None:
    names = ["a", "gpu7.rack-2_b", "Decoder-0", "decoder-a", "decoder-0b", "a" * 48]
    assert [worker.name for worker in router_settings({"workers": named(*names)}).workers] == names


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "workers is missing"),
        ({"workers": []}, "at least 1 item"),
        ({"workers": 4}, "how many processes serve is told by processes, not 4"),
        ({"workers": WORKERS, "prot": 1}, "unknown key 'prot'; did you mean 'port'?"),
        ({"workers": [{"url": "localhost:1"}]}, "write it as http://host:port"),
        ({"workers": [{"url": "ftp://h:1"}]}, "write it as http://host:port"),
        ({"workers": [{"url": "http://user@h:1"}]}, "write it as http://host:port"),
        ({"workers": [{"url": "http://h:1?a=b"}]}, "write it as http://host:port"),
        ({"workers": [{"url": "http://h:1/v1"}]}, "is where clients of an engine begin; leave out /v1: http://h:1"),
        ({"workers": [{"url": "http://h:1/a/v1/"}]}, "leave out /v1: http://h:1/a"),
        ({"workers": [{"url": "http://h:1"}, {"url": "http://h:1/"}]}, "http://h:1 is named twice; name it once"),
        ({"workers": [WORKERS[1], *WORKERS, WORKERS[1]]}, "http://[::1]:8200 is named 3 times; name it once"),
        ({"workers": [WORKERS[0], WORKERS[0] | {"role": "decode"}]}, "does both once, without a role"),
        ({"workers": [{"url": "http://h"}, {"url": "HTTP://H:80"}]}, "workers: http://h is named twice"),
        ({"workers": [{"url": "http://h:1", "role": "both"}]}, "workers[0].role"),
        ({"workers": named("a", "b", "a")}, "workers: a is the name of two engines"),
        *(({"workers": named("a", name)}, "workers[1].name: ") for name in NO_NAMES),
        ({"workers": named("decoder-0")}, "'decoder-0' is of the form that engines without a name are given"),
        ({"workers": WORKERS, "port": 70000}, "port: must be less than"),
        (
            {"workers": WORKERS, "handoff_timeout_seconds": 0},
            "handoff_timeout_seconds: must be greater",
        ),
        ({"workers": [{"url": "http://h:1/a b"}]}, "write it as http://host:port"),
        ({"workers": [{"url": "http://h:1\r\nx: y"}]}, "write it as http://host:port"),
        ({"workers": WORKERS, "engine_api_key": "secret\n"}, "engine_api_key: it must be of visible ASCII"),
        ({"workers": WORKERS, "session_names": ["a b"]}, "neither a header's name nor a path in the body"),
        ({"workers": WORKERS, "session_names": ["$.a..b"]}, "neither a header's name nor a path in the body"),
        ({"workers": WORKERS, "session_names": ["a.b."]}, "neither a header's name nor a path in the body"),
        ({"workers": WORKERS, "session_names": ["metadata.chat"]}, "write a path in the body as $.metadata.chat"),
        ({"workers": WORKERS, "session_names": ["Cookie"]}, "carries credentials"),
        (
            {"workers": WORKERS, "api_keys": [{"key": "a long secret", "tenant": name} for name in ("a", "b")]},
            "api_keys: a and b have the same key; name each key once",
        ),
        ({"workers": [{"url": "http://h:1", "contract": {"role": "consumer"}}]}, "workers[0].contract.models"),
        ({"workers": [declared(block_size=True)]}, "workers[0].contract.block_size: must be a number, not True"),
        (
            {"workers": [declared(kv_endpoints=[{"engine_id": "e", "host": "h", "port": 1, "tp_siz": 2}])]},
            "unknown key 'workers[0].contract.kv_endpoints[0].tp_siz'; did you mean 'tp_size'?",
        ),
    ],
)
def test_what_does_not_fit_is_told_in_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        router_settings(values)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_holds_a_mapping(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text("port: 1\nworkers:\n  - url: http://h:1\n")
    assert read_file(path)["port"] == 1
    for content in ("- a\n", "a: [\n", "\tx", "port: 1\nport: 2\n", '{"port": 1, "port": 2}'):
        path.write_text(content)
        with pytest.raises(ConfigurationError, match=str(path)):
            read_file(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_file(tmp_path / "missing.yaml")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RouterSettings]:
    runs: list[RouterSettings] = []
    monkeypatch.setattr(serve, "run", lambda settings, again: runs.append(settings))
    monkeypatch.setattr(logs, "configure_logging", lambda level: None)
    return runs


def command(*arguments: str) -> Any:
    import typer

    app = typer.Typer()
    app.command()(route)
    return CliRunner().invoke(app, arguments)


def test_the_command_takes_engines_and_switches(started: list[RouterSettings]) -> None:
    engines = ["--prefill", "http://p:1", "--decode", "http://d:1", "--decode", "http://d:2"]
    result = command(*engines, "--enable-decoder-append-prefill", "--port", "0", "--wait", "3")
    assert result.exit_code == 0, result.output
    (settings,) = started
    assert [(worker.url, worker.role) for worker in settings.workers] == [
        ("http://p:1", "prefill"),
        ("http://d:1", "decode"),
        ("http://d:2", "decode"),
    ]
    assert (settings.port, settings.start_wait_seconds, settings.append_prefill) == (0, 3.0, True)


def test_options_win_over_the_file(started: list[RouterSettings], tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text("port: 1\nhost: 0.0.0.0\nenable_decoder_append_prefill: true\nworkers:\n  - url: http://h:1\n")
    assert command("--config", str(path), "--port", "2").exit_code == 0
    assert command("--config", str(path), "--decode", "http://d:1").exit_code == 0
    kept, replaced = started
    assert (kept.port, kept.host, kept.workers[0].url, kept.append_prefill) == (
        2,
        "0.0.0.0",
        "http://h:1",
        True,
    )
    assert [worker.url for worker in replaced.workers] == ["http://d:1"]


def test_the_commands_complaints_name_the_file(started: list[RouterSettings], tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text("prot: 1\n")
    assert command("--config", str(path)).stderr.startswith(f"schedloom: {path}: unknown key 'prot'; did you")
    path.write_text("port: 1\n")
    assert f"{path}: workers is missing; name the engines there" in command("--config", str(path)).stderr
    assert command("--config", str(path), "--prefill", "http://p:1", "--decode", "http://d:1").exit_code == 0


@pytest.mark.parametrize("key", ["model: m", "kv-transfer-config: {}", "additional_config: {}", "kind: engine"])
def test_an_engines_file_is_told_in_one_sentence(started: list[RouterSettings], tmp_path: Path, key: str) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(f"port: 1\n{key}\n")
    told = command("--config", str(path)).stderr
    assert f"{path} is an engine's configuration (key '{key.split(':')[0]}')" in told and told.count("\n") == 1


def test_the_command_says_what_is_wrong_and_ends(started: list[RouterSettings], tmp_path: Path) -> None:
    for arguments, status in (
        ((), 2),
        (("--prefill", "nowhere"), 2),
        (("--prefill", "http://p:1", "--decode", "http://d:1", "--wait", "inf"), 1),
        (("--config", str(tmp_path / "missing.yaml")), 1),
    ):
        result = command(*arguments)
        assert result.exit_code == status and started == []
        assert result.stderr.startswith("schedloom: ") and result.stderr.count("\n") == 1
