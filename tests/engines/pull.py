"""Requests whose KV a real Prefiller computed, preempted and restored on a real Decoder. Run as a script.

Usage: python -m tests.engines.pull MODEL. A Prefiller and two Decoders, synchronous and asynchronous, live in this
process beside one another and transfer KV by NIXL. The model runner comes from the environment. Prints one JSON object:
what each Decoder answered and did, and what the Prefiller answers by itself.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from schedloom.adapters.engine.reality.engines import (
    connectors,
    keep_asynchronous_scheduling,
    neighbour,
    scheduler_of,
)
from schedloom.demo.engines import free_ports
from tests.engines.inprocess import Bench, add, decisions, prompt, sampling

REQUESTS = 16
PROMPT = 58
ANSWER = 16
BLOCKS = 2 * REQUESTS + 3
"""Two blocks hold a prompt; its answer needs a third, which the pool has for two."""

OFFLOAD = {"scheduler_config": {"policies": [{"name": "offload_restore", "min_saved_tokens": 1}]}}
PROMPTS = {f"pulled-{index}": prompt(index, PROMPT) for index in range(REQUESTS)}


def main() -> None:
    model = sys.argv[1]
    keep_asynchronous_scheduling()
    producer = neighbour(
        model, free_ports(1)[0], kv_transfer_config={"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    )
    decoders = {mode: decoder(model, mode == "async") for mode in ("sync", "async")}
    facts = {mode: pulled(producer, consumer) for mode, consumer in decoders.items()}
    facts["alone"] = {"tokens": alone(producer)}
    print(json.dumps(facts), flush=True)
    # Engines that share a process cannot be shut down one by one: the end of the process ends them.
    os._exit(0)


def decoder(model: str, asynchronous: bool) -> Any:
    return neighbour(
        model,
        free_ports(1)[0],
        asynchronous=asynchronous,
        num_gpu_blocks_override=BLOCKS,
        kv_transfer_config=connectors("both"),
        additional_config=OFFLOAD,
    )


def pulled(producer: Any, consumer: Any) -> dict[str, Any]:
    transfers = {name: prefilled(producer, name) for name in PROMPTS}
    with Bench(consumer) as bench:
        for name, transfer in transfers.items():
            add(consumer, name, PROMPTS[name], sampling(ANSWER, kv_transfer_params=transfer))
        bench.drain()
    for _ in range(5):
        # The Prefiller hears of finished pulls when it steps.
        producer.llm_engine.engine_core.engine_core.step_fn()
    return {
        "scheduler": type(scheduler_of(consumer)).__name__,
        "tokens": bench.tokens,
        "prefilled": [step["prefill"] for step in bench.steps if step["prefill"]],
        "decisions": decisions(consumer),
        "left on the Prefiller": len(scheduler_of(producer).requests),
    }


def prefilled(producer: Any, name: str) -> dict[str, Any]:
    """What the Prefiller says of where the KV is."""
    add(producer, name, PROMPTS[name], sampling(1, kv_transfer_params={"do_remote_decode": True}))
    while True:
        for output in producer.llm_engine.step():
            if output.finished:
                transfer: dict[str, Any] = output.kv_transfer_params
                return transfer


def alone(producer: Any) -> dict[str, list[int]]:
    with Bench(producer) as bench:
        for name, tokens in PROMPTS.items():
            bench.add(name, tokens, ANSWER)
        bench.drain()
    return bench.tokens


if __name__ == "__main__":
    main()
