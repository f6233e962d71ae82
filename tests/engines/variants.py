"""Preempted requests on engines of other shapes, and with other caches. Run as a script.

Usage: python -m tests.engines.variants MODEL SHAPE, a key of ``SHAPES``. The model runner comes from the environment.
Prints one JSON object: what a tight engine did, and whether it answered what vLLM's own answers that has room for all.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

from schedloom.adapters.engine.reality.engines import connectors, scheduler_of, start
from tests.engines.inprocess import ask, decisions, prompt, stop

REQUESTS = 12
ANSWER = 40
BLOCKS = 2 * REQUESTS + 3


@dataclass(frozen=True)
class Shape:
    """``tight`` are settings of the engine with few ``blocks``, ``cache`` those that both have. A block beside Mamba
    states is so large that only a longer ``answer`` needs another.
    """

    tight: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)
    blocks: int = BLOCKS
    answer: int = ANSWER


SHAPES: dict[str, Shape] = {
    "plain": Shape(),
    "ngram": Shape({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}}),
    "workers": Shape({"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}),
    "precisions": Shape(cache={"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["sliding_window"]}, blocks=40),
    "hybrid": Shape(blocks=28, answer=110),
}
"""Drafts by n-grams, some of which are rejected; two tensor-parallel worker processes, each with half of the KV heads
and its own host memory; caches of two precisions, for a model with sliding windows; Mamba states beside attention, for
a model that has them. vLLM zeroes new blocks of the last two.
"""

OFFLOADING: dict[str, Any] = {
    "additional_config": {"scheduler_config": {"policies": [{"name": "offload_restore", "min_saved_tokens": 1}]}},
    "kv_transfer_config": connectors("offload"),
}
PROMPTS = [prompt(index, 29) + prompt(index, 29) for index in range(REQUESTS)]
"""Each says everything twice, so that n-grams find drafts."""


def main() -> None:
    model, name = sys.argv[1:]
    shape = SHAPES[name]
    undisturbed = start(model, **shape.cache)
    expected = ask(undisturbed, PROMPTS, shape.answer)
    stop(undisturbed)
    engine = start(model, num_gpu_blocks_override=shape.blocks, **shape.cache, **shape.tight, **OFFLOADING)
    scheduler = scheduler_of(engine)
    drafts, steps = Drafts(scheduler), Steps(scheduler)
    tokens = ask(engine, PROMPTS, shape.answer)
    facts = {"exact": tokens == expected, "decisions": decisions(engine), "drafts": drafts.counts}
    facts |= {"steps": steps.counts, "groups": len(scheduler.kv_cache_config.kv_cache_groups)}
    print(json.dumps(facts), flush=True)
    stop(engine)


class Steps:
    """Blocks that the worker was told to zero, and requests that were preempted, restored or not."""

    def __init__(self, scheduler: Any) -> None:
        self.counts = {"zeroed": 0, "preempted": 0}
        schedule = scheduler.schedule

        def watched(*arguments: Any) -> Any:
            output = schedule(*arguments)
            self.counts["zeroed"] += len(output.new_block_ids_to_zero or ())
            self.counts["preempted"] += len(output.preempted_req_ids or ())
            return output

        scheduler.schedule = watched


class Drafts:
    """Draft tokens that were scheduled, and steps that produced more than one token for a request."""

    def __init__(self, scheduler: Any) -> None:
        self.counts = {"scheduled": 0, "accepted": 0}
        update = scheduler.update_from_output

        def watched(scheduled: Any, produced: Any) -> Any:
            drafts = scheduled.scheduled_spec_decode_tokens
            for request_id, sampled in zip(produced.req_ids, produced.sampled_token_ids, strict=True):
                self.counts["scheduled"] += len(drafts.get(request_id, ()))
                self.counts["accepted"] += max(0, len(sampled) - 1)
            return update(scheduled, produced)

        scheduler.update_from_output = watched


if __name__ == "__main__":
    main()
