"""A5, A9: append, preemption, save, host copy ready, restore and continuation inside one request, on real engines."""

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

SCRIPT = Path(__file__).with_name("chain.py")
CHAINS = int(os.environ.get("SCHEDLOOM_CHAINS", "12"))
"""Restores to reach on each runner; the deeper tier asks for 72."""

CHAIN = ["ADMIT", "OFFLOAD", "SAVED", "LOADING", "RESTORES"]
"""What the decision trace of one request must contain, in this order."""


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_the_whole_chain_is_exact(runner: Any, tmp_path: Path) -> None:
    trace = tmp_path / "decisions.jsonl"
    attempts = run(runner, trace)
    decided = decisions(trace)
    chained = [attempt for attempt in attempts if contains(decided[attempt["id"]], CHAIN)]
    assert len(chained) >= CHAINS * 3 // 4, f"only {len(chained)} of {len(attempts)} attempts went through all of it"
    served = [attempt for attempt in attempts if "REJECT" not in decided[attempt["id"]]]
    assert [attempt["id"] for attempt in served if attempt["tokens"] != attempt["undisturbed"]] == []
    print(f"{runner}: {len(chained)} whole chains in {len(served)} served attempts, all exact")


def run(runner: Any, trace: Path) -> list[dict[str, Any]]:
    side_channel, port = free_ports(2)
    settings = EngineSpec("chain", port, side_channel_port=side_channel, runner=runner).full_environment()
    environment = {**settings, FILE_VARIABLE: str(trace)}
    command = [sys.executable, str(SCRIPT), str(cached_model()), str(CHAINS)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    attempts: list[dict[str, Any]] = json.loads(ran.stdout.strip().splitlines()[-1])
    return attempts


def decisions(trace: Path) -> dict[str, list[str]]:
    """Decisions by request. vLLM appends a random part to the ids that it is given."""
    decided: dict[str, list[str]] = defaultdict(list)
    for line in trace.read_text().splitlines():
        event = json.loads(line)
        name = "-".join(event["request_id"].split("-")[:3])
        decided[name].append(event["decision"])
    return decided


def contains(events: list[str], wanted: list[str]) -> bool:
    remaining = iter(events)
    return all(any(event == each for event in remaining) for each in wanted)
