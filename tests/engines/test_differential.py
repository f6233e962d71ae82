"""C5, X6: the runner models read, write, sample, save and zero as vLLM's real runners do, told the same.

The scheduler outputs are those of real engines that preempt, restore and compute again. Models that are broken on
purpose, in their order or in their block tables, are told apart from the real runner on the same outputs.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from schedloom.demo.engines import EngineSpec, free_ports
from schedloom.demo.model import cached_model
from tests.engines.breakages import BROKEN

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

Facts = dict[str, Any]


@pytest.fixture(scope="module", params=["v1", pytest.param("v2", marks=pytest.mark.deep)])
def facts(request: pytest.FixtureRequest) -> tuple[str, Facts]:
    (port,) = free_ports(1)
    spec = EngineSpec("recorded", port, runner=request.param)
    command = [sys.executable, "-m", "tests.engines.differential", str(cached_model())]
    ran = subprocess.run(command, env=spec.full_environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    facts: Facts = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith('{"facts"')))["facts"]
    return request.param, facts


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_model_does_what_the_real_runner_does(facts: tuple[str, Facts], mode: str) -> None:
    _, seen = facts
    assert seen[mode]["number"] == 0, seen[mode]["differences"]
    met = seen[mode]["met"]
    assert met["preempted"] >= 3 and met["restored"] >= 1 and met["prefix hits"] >= 1
    assert met["preempted"] > met["restored"], "inconclusive: nobody was computed again"
    assert met["chunks"] >= 5 and met["blocks used again"] >= 5 and met["sampled"] >= 200


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_broken_model_is_told_apart(facts: tuple[str, Facts], mode: str) -> None:
    runner, seen = facts
    assert seen[mode]["broken"].keys() == BROKEN[runner].keys()
    assert [name for name, steps in seen[mode]["broken"].items() if not steps] == []
