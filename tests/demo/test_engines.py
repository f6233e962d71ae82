"""Starting and, above all, ending engines. Stand-ins take vLLM's place, except in the tests marked `engines`."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from schedloom.demo.engines import Engine, EngineFailed, EngineSpec, Fleet, Runner, free_ports
from schedloom.demo.model import ANSWER_TOKENS, cached_model

ROOT = Path(__file__).parents[2]
RUNNERS: tuple[Runner, ...] = ("v1", "v2")

# Runs as a process of its own, so that it can be killed: starts one stand-in, reports, and waits to be ended.
PARENT = """
import sys, time
from pathlib import Path
from tests.demo.test_engines import StandIn, free_ports
from schedloom.demo.engines import Fleet
folder = Path(sys.argv[1])
with Fleet([StandIn("stand-in", free_ports(1)[0], notes=folder / "pids")], folder, folder):
    print("ready", flush=True)
    sys.stdin.read(1)
    if sys.argv[2] == "raise":
        raise RuntimeError
"""

STAND_IN = """
import http.server, os, subprocess, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health)
child = subprocess.Popen(["sleep", "600"])
open(sys.argv[2], "w").write(f"{os.getpid()} {child.pid}")
server.serve_forever()
"""


@dataclass(frozen=True)
class StandIn(EngineSpec):
    """Answers health checks, has a child process of its own, and notes the ids of both."""

    notes: Path = Path()
    script: str = STAND_IN

    def command(self, model: Path) -> list[str]:
        return [sys.executable, "-c", self.script, str(self.port), str(self.notes)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def noted(notes: Path) -> list[int]:
    return [int(pid) for pid in notes.read_text().split()]


def assert_gone(pids: list[int]) -> None:
    for _ in range(1000):
        if not any(map(is_running, pids)):
            return
        time.sleep(0.05)
    raise AssertionError(f"still running: {pids}")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, "return", "raise"])
def test_nothing_outlives_the_process_that_started_it(end: signal.Signals | str, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), str(end)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with parent:
        assert parent.stdout and parent.stdout.readline() == b"ready\n"
        pids = noted(tmp_path / "pids")
        assert len(pids) == 2 and all(map(is_running, pids))
        if isinstance(end, signal.Signals):
            parent.send_signal(end)
    assert_gone(pids)


def test_a_command_that_ignores_the_request_to_end_is_killed(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + STAND_IN
    with Fleet([StandIn("deaf", free_ports(1)[0], notes=tmp_path / "pids", script=deaf)], tmp_path, tmp_path):
        pids = noted(tmp_path / "pids")
    assert_gone(pids)


def test_a_fleet_reports_who_is_ready_and_changes_while_running(tmp_path: Path) -> None:
    ready: list[str] = []
    one, two, three = (
        StandIn(name, port, notes=tmp_path / name) for name, port in zip("abc", free_ports(3), strict=True)
    )
    with Fleet(
        [one, two], tmp_path, tmp_path, on_ready=lambda engine, seconds: ready.append(engine.spec.name)
    ) as fleet:
        assert sorted(ready) == ["a", "b"]
        fleet.stop("a")
        assert_gone(noted(one.notes))
        fleet.start(three)
        assert ready[2:] == ["c"] and set(fleet.engines) == {"b", "c"}
    assert_gone([*noted(two.notes), *noted(three.notes)])


def test_one_failing_engine_is_explained_and_ends_the_others(tmp_path: Path) -> None:
    broken = "raise ValueError('no such model')"
    good, bad = (
        StandIn(name, port, notes=tmp_path / name) for name, port in zip(["good", "bad"], free_ports(2), strict=True)
    )
    bad = StandIn(bad.name, bad.port, notes=bad.notes, script=broken)
    with pytest.raises(
        EngineFailed, match=r"(?s)Engine bad ended with status 1\.\nValueError: no such model\n.*Traceback"
    ):
        Fleet([good, bad], tmp_path, tmp_path).__enter__()
    if good.notes.exists():
        assert_gone(noted(good.notes))


def test_an_engine_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    silent = StandIn("silent", free_ports(1)[0], script="import time; time.sleep(600)")
    with pytest.raises(EngineFailed, match=r"Engine silent was not ready after \d+ s"):
        Fleet([silent], tmp_path, tmp_path, patience_seconds=0.2).__enter__()


def test_each_role_gets_its_own_configuration_only() -> None:
    producer = EngineSpec("p", 1, "producer", 2, kv_lease_seconds=9).command(Path("model"))
    assert json.loads(option(producer, "--kv-transfer-config")) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"kv_lease_duration": 9},
    }
    alone = EngineSpec("s", 1, additional_config={"scheduler_config": {"x": True}}).command(Path("model"))
    assert not [argument for argument in alone if argument.startswith("--kv-transfer-config")]
    assert json.loads(option(alone, "--additional-config")) == {"scheduler_config": {"x": True}}
    with pytest.raises(ValueError, match="needs a side_channel_port"):
        EngineSpec("d", 1, "consumer")


def test_the_environment_is_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    environment = EngineSpec("s", 1, runner="v2", environment={"OMP_NUM_THREADS": "2"}).full_environment()
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment
    assert (environment["VLLM_USE_V2_MODEL_RUNNER"], environment["OMP_NUM_THREADS"]) == ("1", "2")
    assert environment["PATH"] == os.environ["PATH"]


def test_free_ports_are_distinct() -> None:
    assert len(set(free_ports(20))) == 20


def option(command: list[str], name: str) -> str:
    return next(argument.partition("=")[2] for argument in command if argument.startswith(f"{name}="))


@pytest.mark.engines
@pytest.mark.timeout(600)
def test_both_runners_give_the_same_varied_text(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        answers = [*pool.map(answers_of, RUNNERS, free_ports(2), [tmp_path / runner for runner in RUNNERS])]
    assert answers[0] == answers[1]
    assert all(len(answer) == 48 and len(set(answer)) > 10 for answer in answers[0])
    assert len(set(map(tuple, answers[0]))) == len(answers[0])


def answers_of(runner: Runner, port: int, logs: Path) -> list[list[int]]:
    """Greedy answers to several prompts, after a check that a sampled one consists of printable text, too."""
    with Fleet([EngineSpec("alone", port, runner=runner)], cached_model(), logs) as fleet:
        engine = fleet.engines["alone"]
        sampled = complete(engine, "What is sampled?", temperature=2.0, seed=1)
        assert (
            set(sampled["token_ids"]) <= set(ANSWER_TOKENS) and list(sampled["text"].encode()) == sampled["token_ids"]
        )
        prompts = ["Hello", "Hello!", "Tell me about foxes. " * 20]
        return [complete(engine, prompt, temperature=0)["token_ids"] for prompt in prompts]


def complete(engine: Engine, prompt: str, **settings: Any) -> Any:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 48, "return_token_ids": True, **settings}
    request = urllib.request.Request(
        f"{engine.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["choices"][0]
