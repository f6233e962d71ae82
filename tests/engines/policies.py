"""Every policy on real engines in this process, and the same work on vLLM's own scheduler. Run as a script.

Usage: python -m tests.engines.policies MODEL. The model runner comes from the environment. Prints one JSON object:
for the plain engine and for each composition, synchronous and asynchronous, what every scenario saw.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schedloom.adapters.engine.peers import INTERVAL_SECONDS, LoadBoard
from schedloom.adapters.engine.reality.engines import keep_asynchronous_scheduling, scheduler_of, start
from tests.engines import chain
from tests.engines.inprocess import Bench, decisions, prompt, stop

Policies = list[dict[str, Any]]

BLOCKS = 24
CHUNK = 32
"""``tpot_guard``'s least chunk: its bound below is one that decodes alone exceed, so that no chunk is larger."""

METERED: Policies = [
    {"name": "short_request_first", "short_tokens": 64},
    {"name": "tpot_guard", "tpot_ms": 0.001, "min_chunk_tokens": CHUNK},
    {"name": "kv_lease"},
    {"name": "balance", "max_hold_seconds": 600, "stale_seconds": 600},
]
PHASED: Policies = [
    {"name": "batch_job_aware", "max_active": 1},
    {"name": "phase_separation", "decode_batch_buckets": [2]},
]
CROWD: Policies = [
    *chain.POLICIES,
    {"name": "kv_lease"},
    {"name": "balance"},
    {"name": "short_request_first", "short_tokens": 4096},
    {"name": "tpot_guard", "tpot_ms": 2000},
]


def short_and_long(bench: Bench) -> dict[str, Any]:
    """Two long requests, then two short ones, all there before the first step."""
    for name, length in {"long-1": 100, "long-2": 90, "short-1": 20, "short-2": 30}.items():
        bench.add(name, prompt(length, length), 2)
    bench.drain()
    return {}


def jobs(bench: Bench) -> dict[str, Any]:
    """Two batch jobs, then two interactive requests, all there before the first step."""
    for index, name in enumerate(("batch-1", "batch-2", "chat-1", "chat-2")):
        bench.add(name, prompt(20 + index, 40), 4, job="batch" if "batch" in name else None)
    bench.drain()
    return {}


def streams_and_an_append(bench: Bench) -> dict[str, Any]:
    """Four streams, and a prompt of eight blocks that arrives while they run."""
    for index in range(4):
        bench.add(f"stream-{index}", prompt(40 + index, 20), 24)
    bench.step(4)
    bench.add("append", prompt(44, 8 * CHUNK), 2)
    bench.drain()
    return {}


def leased_and_not(bench: Bench) -> dict[str, Any]:
    """A turn of a session, a later one without a session, others that take all blocks twice, and both come back."""
    turns = {"leased": (prompt(60, 100), "session"), "not-leased": (prompt(61, 100), None)}
    for name, (tokens, session) in turns.items():
        bench.add(name, tokens, 4, session=session)
        bench.drain()
    for index in range(8):
        bench.add(f"other-{index}", prompt(70 + index, 180), 1)
        bench.drain()
    for name, (tokens, session) in turns.items():
        bench.add(f"{name}-again", tokens + bench.tokens[name] + prompt(62, 10), 4, session=session)
        bench.drain()
    return {name: bench.cached[f"{name}-again"] for name in turns}


def beside_a_full_peer(bench: Bench) -> dict[str, Any]:
    """A stream runs, and somebody arrives while a peer is full. The peer is a fake that only publishes its load."""
    with tempfile.TemporaryDirectory() as folder:
        peer = LoadBoard(Path(folder) / "board", rank=1)
        bench.scheduler.view.board = LoadBoard(Path(folder) / "board", rank=0)
        bench.add("stream", prompt(80, 20), 16)
        bench.step(2)
        peer.publish(running=16, waiting=3, max_running=16, kv_usage=0.9)
        bench.add("newcomer", prompt(81, 20), 2)
        time.sleep(2 * INTERVAL_SECONDS)
        bench.step(6)
        held = [step for step in bench.steps if "newcomer" not in step["new"]]
        peer.publish(running=0, waiting=0, max_running=16, kv_usage=0.0)
        bench.drain()
        bench.scheduler.view.board = None
    return {"steps without the newcomer": len(held)}


Scenario = Callable[[Bench], dict[str, Any]]

METERED_WORK: list[Scenario] = [short_and_long, streams_and_an_append, leased_and_not]
PHASED_WORK: list[Scenario] = [jobs, streams_and_an_append]


def main() -> None:
    model = sys.argv[1]
    keep_asynchronous_scheduling()
    facts = {"plain": play(model, False, None, [*METERED_WORK, jobs])}
    for mode in ("sync", "async"):
        asynchronous = mode == "async"
        facts[f"metered {mode}"] = play(model, asynchronous, METERED, [*METERED_WORK, beside_a_full_peer])
        facts[f"phased {mode}"] = play(model, asynchronous, PHASED, PHASED_WORK)
        facts[f"crowd {mode}"] = crowd(model, asynchronous)
    facts["plain crowd"] = undisturbed_crowd(model, facts["crowd sync"]["prompts"])
    print(json.dumps(facts))


def play(model: str, asynchronous: bool, policies: Any, scenarios: list[Scenario]) -> dict[str, Any]:
    """What came out of each scenario, all on one engine."""
    section = {"scheduler_config": {"policies": policies}} if policies else {}
    engine = start(model, asynchronous, num_gpu_blocks_override=BLOCKS, additional_config=section)
    facts: dict[str, Any] = {"scheduler": type(scheduler_of(engine)).__name__}
    for scenario in scenarios:
        with Bench(engine) as bench:
            seen = scenario(bench)
        facts[scenario.__name__] = {"tokens": bench.tokens, "steps": bench.steps, **seen}
    facts["decisions"] = decisions(engine)
    stop(engine)
    return facts


def crowd(model: str, asynchronous: bool) -> dict[str, Any]:
    """One wave of the chain, in which nearly everybody is preempted, under more policies."""
    engine = start(model, asynchronous, **chain.decoder(CROWD))
    attempts = chain.one_wave(engine, 0, "crowd")
    facts = {
        "scheduler": type(scheduler_of(engine)).__name__,
        "tokens": {attempt["id"]: attempt["tokens"] for attempt in attempts},
        "prompts": {attempt["id"]: attempt["prompt"] for attempt in attempts},
        "decisions": decisions(engine),
    }
    stop(engine)
    return facts


def undisturbed_crowd(model: str, prompts: dict[str, list[int]]) -> dict[str, Any]:
    return {"tokens": dict(zip(prompts, chain.undisturbed(model, list(prompts.values())), strict=True))}


if __name__ == "__main__":
    main()
