"""A5, A8, A9: on real engines, restored requests give the same tokens and log-probabilities to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from schedloom.demo.model import cached_model
from tests.adapters.engine.offload.sliding_model import make_sliding_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("real_engine.py")
BLOCK = 32
TIGHT = {"blocks": 24}
TIGHT_HYBRID = {"blocks": 36}
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TRITON_INTERPRET": "1",
    "UCX_TLS": "tcp,self,sm",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "schedloom,schedloom_cpu_engine",
}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "v1": [{}, TIGHT, TIGHT | {"asynchronous": True}, TIGHT | {"multi": True}, TIGHT | {"fault": "wrong block"}],
    "v2": [{}, TIGHT, TIGHT | {"asynchronous": True}],
    "hybrid": [{}, TIGHT_HYBRID, TIGHT_HYBRID | {"asynchronous": True}, TIGHT_HYBRID | {"fault": "no tail"}],
}
"""For each runner, and for a model with two cache groups on the first, the undisturbed run first."""


@pytest.fixture(scope="module")
def under_way(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[list[dict[str, Any]]]]]:
    """Everything that is to run, two processes at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(_run, name, tmp_path_factory.mktemp(name)) for name in SETTINGS}


@pytest.fixture(scope="module", params=list(SETTINGS))
def runs(request: pytest.FixtureRequest, under_way: dict[str, Future[list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """What came out under each of the settings."""
    return under_way[request.param].result()


def _run(name: str, folder: Path) -> list[dict[str, Any]]:
    hybrid, second = name == "hybrid", name == "v2"
    model = make_sliding_model(folder / "model") if hybrid else cached_model()
    environment = {**os.environ, **ENVIRONMENT, "VLLM_USE_V2_MODEL_RUNNER": str(int(second))}
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
    command = [sys.executable, str(SCRIPT), str(model), json.dumps(SETTINGS[name])]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=850)
    assert ran.returncode == 0, ran.stderr[-4000:]
    facts: list[dict[str, Any]] = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("[{")))
    assert {fact["groups"] for fact in facts} == {2 if hybrid else 1}
    return [{**setting, **fact, "second": second} for setting, fact in zip(SETTINGS[name], facts, strict=True)]


def sound(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run for run in runs[1:] if "fault" not in run]


def test_restored_requests_go_on_to_the_bit(runs: list[dict[str, Any]]) -> None:
    for run in sound(runs):
        assert run["outputs"] == runs[0]["outputs"]


def test_there_were_restores_of_partial_tails_and_several_at_once(runs: list[dict[str, Any]]) -> None:
    for run in sound(runs):
        assert run["counters"]["restores"] >= 4
        assert any(tokens % BLOCK for tokens, _ in run["restored"])
        assert max(at_once for _, at_once in run["restored"]) >= 2


def test_nothing_is_held_afterwards(runs: list[dict[str, Any]]) -> None:
    for run in sound(runs):
        assert run["held"] == [0, 0]


def test_the_scheduler_is_the_configured_one(runs: list[dict[str, Any]]) -> None:
    for run in sound(runs):
        assert run["scheduler"] == ("SchedloomAsyncScheduler" if run.get("asynchronous") else "SchedloomScheduler")


def test_scheduler_and_worker_mean_the_same_model_runner(runs: list[dict[str, Any]]) -> None:
    """They give resumed requests by different protocols, and would take each other's words for other tokens."""
    for run in runs:
        assert run["runners"] == [run["second"]] * 2


def test_a_wrong_block_would_be_seen(runs: list[dict[str, Any]]) -> None:
    for run in runs:
        if "fault" in run:
            assert run["outputs"] != runs[0]["outputs"]
