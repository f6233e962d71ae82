"""A4, A5, X1, X2, X4: every policy acts on real engines, both runners, sync and async, and no token changes.

What a policy did is read from the batches that the real scheduler gave to the real model runner, and from the decision
trace. A plain engine does the same work, so that each effect is one that is not there without the policy.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from schedloom.demo.engines import EngineSpec, free_ports
from schedloom.demo.model import cached_model
from tests.engines.policies import CHUNK

pytestmark = [pytest.mark.engines, pytest.mark.deep, pytest.mark.timeout(900)]

Facts = dict[str, Any]

MODES = ["sync", "async"]
SCENARIOS = ["short_and_long", "streams_and_an_append", "leased_and_not", "jobs"]


@pytest.fixture(scope="module", params=["v1", "v2"])
def facts(request: pytest.FixtureRequest) -> Facts:
    side_channel, port = free_ports(2)
    spec = EngineSpec("policies", port, side_channel_port=side_channel, runner=request.param)
    command = [sys.executable, "-m", "tests.engines.policies", str(cached_model())]
    ran = subprocess.run(command, env=spec.full_environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    seen: Facts = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith('{"plain"')))
    return seen


def admitted(scenario: Facts) -> list[str]:
    """Names in the order in which they were first scheduled."""
    return [name for step in scenario["steps"] for name in step["new"]]


def mixed(scenario: Facts) -> list[Facts]:
    """Steps that have prefill and decodes in one batch."""
    return [step for step in scenario["steps"] if step["prefill"] and step["decode"]]


def with_append(scenario: Facts) -> list[Facts]:
    return [step for step in mixed(scenario) if "append" in step["prefill"]]


@pytest.mark.parametrize("mode", MODES)
def test_no_token_changes(facts: Facts, mode: str) -> None:
    for policies in ("metered", "phased"):
        run = facts[f"{policies} {mode}"]
        compared = [name for name in SCENARIOS if name in run]
        assert len(compared) >= 2
        for name in compared:
            assert run[name]["tokens"] == facts["plain"][name]["tokens"]


@pytest.mark.parametrize("mode", MODES)
def test_the_scheduler_is_the_composed_one(facts: Facts, mode: str) -> None:
    expected = "SchedloomAsyncScheduler" if mode == "async" else "SchedloomScheduler"
    runs = [run for name, run in facts.items() if name.endswith(f" {mode}")]
    assert [run["scheduler"] for run in runs] == [expected] * 3
    assert facts["plain"]["scheduler"] == "Scheduler"


@pytest.mark.parametrize("mode", MODES)
def test_short_requests_go_first(facts: Facts, mode: str) -> None:
    assert admitted(facts["plain"]["short_and_long"]) == ["long-1", "long-2", "short-1", "short-2"]
    assert admitted(facts[f"metered {mode}"]["short_and_long"]) == ["short-1", "short-2", "long-1", "long-2"]


@pytest.mark.parametrize("mode", MODES)
def test_batch_jobs_wait_and_only_one_runs(facts: Facts, mode: str) -> None:
    assert admitted(facts["plain"]["jobs"]) == ["batch-1", "batch-2", "chat-1", "chat-2"]
    run = facts[f"phased {mode}"]["jobs"]
    assert admitted(run) == ["chat-1", "chat-2", "batch-1", "batch-2"]
    together = [{*step["prefill"], *step["decode"]} for step in run["steps"]]
    assert not any({"batch-1", "batch-2"} <= names for names in together)
    assert any({"batch-1", "batch-2"} <= {*step["prefill"]} for step in facts["plain"]["jobs"]["steps"])


@pytest.mark.parametrize("mode", MODES)
def test_no_batch_mixes_phases_and_none_is_too_large(facts: Facts, mode: str) -> None:
    assert mixed(facts["plain"]["streams_and_an_append"]), "inconclusive: nothing to separate"
    run = facts[f"phased {mode}"]["streams_and_an_append"]
    assert mixed(run) == []
    assert max(len(step["decode"]) for step in run["steps"]) == 2
    assert any(step["prefill"] for step in run["steps"])


@pytest.mark.parametrize("mode", MODES)
def test_prefill_beside_streams_is_cut(facts: Facts, mode: str) -> None:
    (unmetered,) = with_append(facts["plain"]["streams_and_an_append"])
    assert unmetered["prefill"] == {"append": 8 * CHUNK}
    metered = with_append(facts[f"metered {mode}"]["streams_and_an_append"])
    assert [step["prefill"] for step in metered] == [{"append": CHUNK}] * 8
    assert all(len(step["decode"]) == 4 for step in metered)


@pytest.mark.parametrize("mode", MODES)
def test_a_lease_survives_what_evicts_the_rest(facts: Facts, mode: str) -> None:
    plain, leased = facts["plain"]["leased_and_not"], facts[f"metered {mode}"]["leased_and_not"]
    assert (plain["leased"], plain["not-leased"]) == (0, 0)
    assert (leased["leased"], leased["not-leased"]) == (96, 0)


@pytest.mark.parametrize("mode", MODES)
def test_nobody_is_admitted_while_a_fake_peer_is_full(facts: Facts, mode: str) -> None:
    run = facts[f"metered {mode}"]
    scenario = run["beside_a_full_peer"]
    assert run["decisions"]["balance HOLD"] == 1
    assert scenario["steps without the newcomer"] >= 6
    assert sum("stream" in step["decode"] for step in scenario["steps"][:6]) >= 4
    assert admitted(scenario) == ["stream", "newcomer"]
    assert len(scenario["tokens"]["newcomer"]) == 2


@pytest.mark.parametrize("mode", MODES)
def test_everything_at_once_while_many_are_preempted(facts: Facts, mode: str) -> None:
    """Attempts whose prefix is gone by the time a policy lets them in are turned away, and answer nothing."""
    run = facts[f"crowd {mode}"]
    decided, tokens = run["decisions"], run["tokens"]
    served = {name: answer for name, answer in tokens.items() if answer}
    assert len(served) == decided["append_prefill ADMIT"] >= len(tokens) // 2
    assert len(tokens) - len(served) == decided.get("append_prefill REJECT", 0)
    assert served == {name: facts["plain crowd"]["tokens"][name] for name in served}
    assert decided["preempt_offload RESTORES"] >= len(tokens) // 8
