"""X2: eight streams keep their pace while a long append joins them, on a real engine.

All figures are ratios within one run, of rounds with and without the guard in turn. ``SCHEDLOOM_PACE_ROUNDS=12`` makes
them steadier, and ``SCHEDLOOM_PACE_RUNNERS=v1,v2`` measures both model runners; V2's kernels are interpreted on a CPU.
"""

import json
import os
import subprocess
import sys
from statistics import median, quantiles
from typing import Any

import pytest

from schedloom.demo.engines import EngineSpec, free_ports
from schedloom.demo.model import cached_model

pytestmark = [pytest.mark.engines, pytest.mark.deep, pytest.mark.timeout(900)]

ROUNDS = os.environ.get("SCHEDLOOM_PACE_ROUNDS", "4")
RUNNERS = os.environ.get("SCHEDLOOM_PACE_RUNNERS", "v1").split(",")


def worst(rounds: list[dict[str, Any]]) -> float:
    """The longest step of a round, in the median of rounds."""
    return float(median(max(each["beside"]) for each in rounds))


@pytest.mark.parametrize("runner", RUNNERS)
def test_streams_keep_their_pace_beside_an_append(runner: Any) -> None:
    facts = run(runner)
    on, off, bound = facts["on"], facts["off"], facts["bound"]
    beside = [milliseconds for each in on for milliseconds in each["beside"]]
    late = quantiles(beside, n=10)[-1] / bound
    waited = median(each["ttft"] for each in on) / median(each["ttft"] for each in off)
    print(
        f"{runner}: worst step with the guard {worst(on) / worst(off):.2f} of that without; in bounds: "
        f"{worst(off) / bound:.1f} without, with it worst {worst(on) / bound:.2f}, p90 {late:.2f}, "
        f"median {median(beside) / bound:.2f}; "
        f"time to the append's first token {waited:.2f}, in {len(beside) / len(on):.0f} steps"
    )
    assert worst(off) > 2 * bound, "inconclusive: the append fits into the bound"
    assert worst(on) < worst(off) / 2
    assert median(beside) < bound
    assert late < 1.5


def run(runner: Any) -> dict[str, Any]:
    (port,) = free_ports(1)
    spec = EngineSpec("pace", port, runner=runner)
    command = [sys.executable, "-m", "tests.engines.pace", str(cached_model()), ROUNDS]
    ran = subprocess.run(command, env=spec.full_environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    facts: dict[str, Any] = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith('{"bound"')))
    return facts
