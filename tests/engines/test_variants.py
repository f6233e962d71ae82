"""A5, A8: preempted requests are saved and restored beside drafts, and by two worker processes that share a model.

``SCHEDLOOM_VARIANT_RUNNERS=v1,v2`` plays it on both model runners. Drafts by n-grams are V1's alone here: the kernel
that V2 finds them with does not run in Triton's interpreter.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from schedloom.demo.engines import EngineSpec, free_ports
from schedloom.demo.model import cached_model

pytestmark = [pytest.mark.engines, pytest.mark.deep, pytest.mark.timeout(900)]

RUNNERS = os.environ.get("SCHEDLOOM_VARIANT_RUNNERS", "v1").split(",")


@pytest.mark.parametrize("runner", RUNNERS)
def test_two_workers_restore_their_halves(runner: Any) -> None:
    facts = run(runner, "workers")
    assert facts["exact"]
    assert facts["decisions"]["preempt_offload RESTORES"] >= 3


def test_drafts_beside_restores() -> None:
    facts = run("v1", "ngram")
    assert facts["exact"]
    assert facts["decisions"]["preempt_offload RESTORES"] >= 3
    assert 0 < facts["drafts"]["accepted"] < facts["drafts"]["scheduled"]


def run(runner: Any, shape: str) -> dict[str, Any]:
    (port,) = free_ports(1)
    spec = EngineSpec("variant", port, runner=runner)
    command = [sys.executable, "-m", "tests.engines.variants", str(cached_model()), shape]
    ran = subprocess.run(command, env=spec.full_environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    facts: dict[str, Any] = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith('{"exact"')))
    return facts
