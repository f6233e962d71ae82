"""A5, A9: append, preemption, save, host copy ready, restore and continuation inside one request, on real engines.

Each runner serves half of the chains with synchronous and half with asynchronous scheduling, which only a test can keep
on. ``SCHEDLOOM_CHAINS=72`` asks for the number that A9 wants; a few more waves, a minute on two quiet cores.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from schedloom.adapters.engine.trace import FILE_VARIABLE
from schedloom.demo.engines import EngineSpec, free_ports
from schedloom.demo.model import cached_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

CHAINS = int(os.environ.get("SCHEDLOOM_CHAINS", "36"))
"""Whole chains to reach on each runner."""

CHAIN = ["ADMIT", "OFFLOAD", "SAVED", "LOADING", "RESTORES"]
"""What the decision trace of one request must contain, in this order."""

Event = dict[str, Any]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_the_whole_chain_is_exact(runner: Any, tmp_path: Path) -> None:
    trace = tmp_path / "decisions.jsonl"
    attempts = run(runner, trace)
    decided = decisions(trace)
    assert [attempt["id"] for attempt in attempts if attempt["tokens"] != attempt["undisturbed"]] == []
    chained = [attempt["id"] for attempt in attempts if went_through(decided[attempt["id"]], len(attempt["tokens"]))]
    print(f"{runner}: {len(chained)} whole chains in {len(attempts)} attempts, all exact")
    assert len(chained) >= CHAINS
    assert {name.split("-")[0] for name in chained} == {"sync", "async"}


def run(runner: Any, trace: Path) -> list[dict[str, Any]]:
    side_channel, port = free_ports(2)
    settings = EngineSpec("chain", port, side_channel_port=side_channel, runner=runner).full_environment()
    environment = {**settings, FILE_VARIABLE: str(trace)}
    command = [sys.executable, "-m", "tests.engines.chain", str(cached_model()), str(CHAINS)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    attempts: list[dict[str, Any]] = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("[{")))
    return attempts


def decisions(trace: Path) -> dict[str, list[Event]]:
    """Decisions by request. vLLM appends a random part to the ids that it is given."""
    decided: dict[str, list[Event]] = defaultdict(list)
    for line in trace.read_text().splitlines():
        event = json.loads(line)
        decided[event["request_id"].rpartition("-")[0]].append(event)
    return decided


def went_through(events: list[Event], answer: int) -> bool:
    """All of the chain in its order, with a resident prefix before it and output on both sides of the preemption."""
    remaining = iter(events)
    found = {wanted: next((event for event in remaining if event["decision"] == wanted), None) for wanted in CHAIN}
    admitted, saved, restored = found["ADMIT"], found["OFFLOAD"], found["RESTORES"]
    if admitted is None or saved is None or restored is None:
        return False
    return bool(admitted["resident_tokens"] and 0 < saved["output_tokens"] < answer and restored["tokens"])
