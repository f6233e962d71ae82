"""What this environment can run is said part by part, with or without an engine."""

import importlib.util
import sys
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from schedloom.adapters import doctor as engine_doctor
from schedloom.adapters.doctor import plugin_filter, seams_of
from schedloom.commands import doctor
from schedloom.core.diagnosis import Finding, Health
from schedloom.core.errors import ConfigurationError
from tests.commands.conftest import Command


def by_part(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.part: finding for finding in findings}


def test_without_an_engine_it_can_still_route(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(engine_doctor, "version", absent)
    found = by_part(list(engine_doctor.examine()))
    assert found["vLLM"].health is Health.WARN and "can route" in found["vLLM"].sentence
    assert found["NIXL"].health is Health.WARN
    assert "seams" not in found and "VLLM_PLUGINS" not in found


def test_an_engine_is_examined_in_full(schedloom: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="needs an engine: install schedloom[cpu]")
    monkeypatch.setenv("VLLM_PLUGINS", "schedloom,schedloom_cpu_engine")
    ended = schedloom("doctor")
    assert ended.status == 0, ended.out
    shown = [" ".join(line.split()) for line in ended.out.splitlines()]
    for part in ("model runner V1", "model runner V2", "platform cpu", "policy append_prefill of schedloom"):
        assert any(f"ok {part}" in line for line in shown), part
    assert sum("ok seams" in line for line in shown) == 2


@pytest.mark.parametrize(
    ("chosen", "health"),
    [
        (None, Health.WARN),
        ("schedloom,other", Health.OK),
        ("other,schedloom", Health.OK),
        ("schedloom", Health.WARN),
        ("other", Health.FAIL),
        ("", Health.FAIL),
    ],
)
def test_the_filter_of_plug_ins(chosen: str | None, health: Health) -> None:
    finding = plugin_filter(chosen, ["other", "schedloom"])
    assert finding.health is health
    assert "schedloom" in finding.sentence or "other" in finding.sentence


def test_a_changed_seam_is_a_failure() -> None:
    assert seams_of(object).health is Health.FAIL


def test_an_unknown_engine_version_is_a_warning() -> None:
    assert engine_doctor._engine_version("0.99.1").health is Health.WARN
    assert engine_doctor._engine_version("0.32.0+cpu").health is Health.OK


@pytest.mark.parametrize("missing", ["vllm.v1.worker.gpu.model_runner"])
def test_an_absent_model_runner_is_a_warning(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(engine_doctor, "find_spec", lambda name: None if name == missing else importlib.util)
    assert engine_doctor._model_runner("V2", missing).health is Health.WARN


def test_a_companion_of_torch_that_does_not_load_is_told_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_sight.py").write_text("raise OSError('libcudart.so.13:\\ncannot open ' + 'x' * 9999)")
    (tmp_path / "torch_sound.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(engine_doctor, "_installed", lambda name: f"{name}'s version")
    (found,) = engine_doctor.broken_companions(("torch_sight", "torch_sound", "torch_nowhere"))
    assert (found.health, found.part) == (Health.WARN, "torch_sight")
    assert found.sentence.startswith("cannot be imported (OSError: libcudart.so.13: cannot open x")
    assert "made for torch torch's version" in found.sentence and len(found.sentence) < 400
    assert found.sentence.endswith("to serve text only, run pip uninstall -y torch_sight")


@pytest.mark.parametrize("module", ["vllm.platforms", "no_such_module"])
def test_companions_are_looked_at_whether_or_not_the_engine_loads(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    pytest.importorskip("vllm", reason="needs an engine: install schedloom[cpu]")
    told = Finding(Health.WARN, "torchaudio", "does not load")
    monkeypatch.setattr(engine_doctor, "broken_companions", lambda: [told])
    monkeypatch.setitem(sys.modules, module, None)
    found = list(engine_doctor._engine_parts())
    assert told in found
    assert any(each.health is Health.FAIL for each in found) is module.startswith("vllm")


def test_a_failure_is_the_commands_status(schedloom: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "entry_points", lambda group: [EntryPoint("engine", "no_such_module:examine", group)])
    ended = schedloom("doctor")
    assert ended.status == 1
    assert "fail engine" in " ".join(ended.out.split()) and "No module named 'no_such_module'" in ended.out


def test_a_broken_policy_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def names(self) -> list[str]:
            return ["x"]

        def load(self, name: str) -> Any:
            raise ConfigurationError("it is broken")

    monkeypatch.setattr(doctor, "Registry", Broken)
    assert Finding(Health.FAIL, "policy", "it is broken") in list(doctor._policies())


def test_an_old_python_is_a_failure() -> None:
    assert doctor._python((3, 9)).health is Health.FAIL
    assert doctor._python((3, 10)).health is Health.OK
