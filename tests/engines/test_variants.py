"""A5, A8: preempted requests are saved and restored beside drafts, by two worker processes that share a model, and
where vLLM zeroes the blocks that it gives out.

``SCHEDLOOM_VARIANT_RUNNERS=v1,v2`` plays it on both model runners. Drafts by n-grams are V1's alone here: the kernel
that V2 finds them with does not run in Triton's interpreter. So are Mamba states, which V2 takes a second a step for.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schedloom.demo.engines import EngineSpec, free_ports
from schedloom.demo.model import cached_model
from tests.adapters.engine.offload.sliding_model import make_sliding_model
from tests.engines.hybrids import make_hybrid_model

pytestmark = [pytest.mark.engines, pytest.mark.deep, pytest.mark.timeout(900)]

CPU = information.read_text() if (information := Path("/proc/cpuinfo")).exists() else ""
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


@pytest.mark.skipif("avx512f" not in CPU, reason="vLLM's kernels for such a cache on CPUs want AVX-512 or AMX")
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_blocks_are_saved_before_they_are_zeroed(runner: Any, tmp_path: Path) -> None:
    """Groups of caches with a precision, and a block size, of their own."""
    facts = run(runner, "precisions", make_sliding_model(tmp_path / "model"))
    assert facts["exact"]
    assert facts["decisions"]["preempt_offload RESTORES"] >= 3
    assert facts["steps"]["zeroed"] > facts["steps"]["preempted"] > 0 and facts["groups"] == 2


def test_a_model_with_mamba_states_is_computed_again(tmp_path: Path) -> None:
    """Its states are not saved, and neither is the KV beside them."""
    facts = run("v1", "hybrid", make_hybrid_model(cached_model(), tmp_path / "model"))
    assert facts["exact"]
    assert facts["decisions"] == {"offload_restore RECOMPUTE": facts["steps"]["preempted"]}
    assert facts["steps"]["zeroed"] > facts["steps"]["preempted"] >= 3 and facts["groups"] > 1


def run(runner: Any, shape: str, model: Path | None = None) -> dict[str, Any]:
    (port,) = free_ports(1)
    spec = EngineSpec("variant", port, runner=runner)
    command = [sys.executable, "-m", "tests.engines.variants", str(model or cached_model()), shape]
    ran = subprocess.run(command, env=spec.full_environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    facts: dict[str, Any] = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith('{"exact"')))
    return facts
