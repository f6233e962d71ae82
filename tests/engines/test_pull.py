"""A5, A8, A9: KV that was pulled from a real Prefiller survives a preemption on the Decoder by way of host memory."""

import json
import subprocess
import sys
from typing import Any

import pytest

from schedloom.demo.engines import EngineSpec, free_ports
from schedloom.demo.model import cached_model

pytestmark = [pytest.mark.engines, pytest.mark.deep, pytest.mark.timeout(900)]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_pulled_kv_is_saved_and_restored(runner: Any) -> None:
    facts = run(runner)
    for mode, scheduler in {"sync": "SchedloomScheduler", "async": "SchedloomAsyncScheduler"}.items():
        seen = facts[mode]
        assert seen["scheduler"] == scheduler
        assert seen["tokens"] == facts["alone"]["tokens"]
        assert seen["decisions"]["preempt_offload RESTORES"] >= 3
        assert seen["prefilled"] == [], "the Decoder computed a prompt, or a preempted request, itself"
        assert seen["left on the Prefiller"] == 0


def run(runner: Any) -> dict[str, Any]:
    (port,) = free_ports(1)
    spec = EngineSpec("pull", port, runner=runner)
    command = [sys.executable, "-m", "tests.engines.pull", str(cached_model())]
    ran = subprocess.run(command, env=spec.full_environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    facts: dict[str, Any] = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith('{"sync"')))
    return facts
