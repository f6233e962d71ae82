"""X9, C3: a policy is switched while the engine runs, and what it decides is counted where the server can show it."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from schedloom import Policy, hookimpl
from schedloom.adapters.engine import control, signals
from schedloom.adapters.engine.control import Mode, modes_of, published_counts, switch, switch_all
from schedloom.adapters.engine.endpoint import DecisionCollector
from schedloom.adapters.engine.trace import DecisionTrace
from schedloom.core.decisions import Decision
from tests.adapters.engine.conftest import Make
from tests.adapters.engine.harness import make_request, tokens
from tests.adapters.engine.parts.test_metering import Fakes, only_policy
from tests.adapters.engine.scenarios import REJECTED


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(control.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(control, "POLL_SECONDS", 0.0)  # A rest, without the waiting.
    return tmp_path


def cold(runner: Any, name: str) -> Any:
    """What becomes of a marked request without KV."""
    runner.scheduler.add_request(make_request(name, tokens(len(name), 300), marked=True))
    runner.drain()
    return runner.ended[name]


def test_a_policy_is_switched_off_and_on_again(make: Make) -> None:
    runner = make("append_prefill")
    assert cold(runner, "a") == REJECTED
    switch("append_prefill", Mode.OFF)
    assert cold(runner, "off") == ("length", None)
    switch("append_prefill", Mode.ON)
    assert cold(runner, "on again") == REJECTED


class Told(Policy):
    """Knows how many steps began."""

    name = "fake"
    steps = 0

    @hookimpl
    def step_begin(self) -> None:
        self.steps += 1


def test_a_switch_holds_from_the_beginning_of_a_step(make: Make) -> None:
    runner = make("fake", registry=Fakes(Told))
    runner.steps(2)
    switch("fake", Mode.OFF)
    runner.step()
    assert only_policy(runner).steps == 2


def test_all_are_switched_off_at_once_and_each_may_be_switched_on_again(make: Make) -> None:
    runner = make("append_prefill")
    switch("append_prefill", Mode.ON)
    switch_all(Mode.OFF)
    assert modes_of(["append_prefill", "kv_lease"]) == {"append_prefill": "off", "kv_lease": "off"}
    assert cold(runner, "off") == ("length", None)
    switch("append_prefill", Mode.ON)
    assert cold(runner, "on") == REJECTED
    switch_all(Mode.OFF)
    switch_all(None)
    assert cold(runner, "as configured") == REJECTED


def test_a_signal_switches_all(folder: Path) -> None:
    code = "import signal; from schedloom.adapters.engine import signals; signals.install(); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        for number, switched in ((signal.SIGUSR1, {"*": "off"}), (signal.SIGUSR2, {}), (signal.SIGUSR1, {"*": "off"})):
            process.send_signal(number)
            wait_for_switches(folder, switched)
        process.stdin.close()


def test_a_signal_that_is_taken_stays_its_owners() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        signals.install()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def wait_for_switches(folder: Path, switched: dict[str, str]) -> None:
    for _ in range(400):
        if (folder / control.SWITCHES).exists() and control.switches() == switched:
            return
        time.sleep(0.05)
    raise AssertionError(f"the switches are {control.switches()}")


def test_no_switch_is_lost_where_several_servers_switch_at_once() -> None:
    code = (
        "import sys; from schedloom.adapters.engine.control import Mode, switch; "
        "[switch(sys.argv[1] + str(n), Mode.OFF) for n in range(100)]"
    )
    servers = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "abc"]
    assert [server.wait() for server in servers] == [0, 0, 0]
    assert len(control.switches()) == 300


def test_in_shadow_it_decides_and_nothing_is_done(make: Make) -> None:
    runner = make("append_prefill")
    switch("append_prefill", Mode.SHADOW)
    assert cold(runner, "shadowed") == ("length", None)
    counts = {tuple(count[:4]): count[4] for count in published_counts()}
    assert counts["append_prefill", "admit", "SHADOW", "REJECT:no_usable_prefix"] == 1


def test_decisions_are_counted_for_the_servers_metrics(make: Make) -> None:
    runner = make("append_prefill")
    for name in ("one", "other"):
        cold(runner, name)
    (family,) = DecisionCollector().collect()
    samples = {tuple(sample.labels.values()): sample.value for sample in family.samples}
    rejected = {labels: value for labels, value in samples.items() if labels[2] == "REJECT"}
    assert sum(rejected.values()) == 2
    assert {(policy, reason) for policy, _, _, reason in rejected} == {("append_prefill", "no_usable_prefix")}


def test_a_busy_engine_publishes_too(make: Make) -> None:
    runner = make("append_prefill")
    runner.scheduler.add_request(make_request("running", tokens(1, 50), max_tokens=100))
    runner.steps(3)
    runner.scheduler.add_request(make_request("cold", tokens(2, 300), marked=True))
    runner.steps(4)
    assert {count[2:] for count in published_counts()} == {("REJECT", "no_usable_prefix", 1)}


def test_the_counts_of_all_processes_are_one_figure(folder: Path) -> None:
    for process in (1, 2):
        (folder / f"decisions-{process}.json").write_text('[["p","admit","ADMIT","r",3]]')
    assert published_counts() == [("p", "admit", "ADMIT", "r", 6)]


def test_an_engine_serves_on_when_nobody_can_be_told(make: Make, folder: Path) -> None:
    """The folder was tidied away, then holds what cannot be read."""
    runner = make("append_prefill")
    assert cold(runner, "a") == REJECTED
    shutil.rmtree(folder)
    assert cold(runner, "tidied") == REJECTED
    folder.mkdir()
    for content in ("", "[]"):
        (folder / control.SWITCHES).write_text(content)
        assert cold(runner, f"unreadable {content}") == REJECTED


def test_a_full_disk_ends_the_log_and_nothing_else() -> None:
    trace = DecisionTrace("/dev/full")
    for _ in range(2):
        trace.record(Decision("r", "p", "admit", "ADMIT", "odd", {"what": {1}}))  # type: ignore[dict-item]
    assert trace.counts.total() == 2


@pytest.mark.parametrize("facts", [{"tokens": 10**30}, {1: 2}, {"word": "half a \ud800"}])
def test_whatever_the_facts_are_there_is_a_line(tmp_path: Path, facts: dict[Any, Any]) -> None:
    DecisionTrace(str(tmp_path / "log")).record(Decision("r", "p", "admit", "ADMIT", "odd", facts))
    assert json.loads((tmp_path / "log").read_text())["reason"] == "odd"


def test_the_first_process_names_the_folder_for_those_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(control.FOLDER_VARIABLE)
    first = control.run_folder()
    assert first.is_dir()
    assert control.run_folder() == first
