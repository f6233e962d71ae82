"""Preempted requests saved and restored on engines of other shapes. Run as a script.

Usage: python -m tests.engines.variants MODEL SHAPE: "plain", "ngram" (drafts by n-grams, some of which are rejected) or
"workers" (two tensor-parallel worker processes, each with half of the KV heads and its own host memory). The model
runner comes from the environment. Prints one JSON object with the token ids of vLLM's own engine and of a tight one.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from schedloom.adapters.engine.reality.engines import connectors, scheduler_of, start
from tests.engines.inprocess import ask, decisions, prompt, stop

REQUESTS = 12
ANSWER = 40
BLOCKS = 2 * REQUESTS + 3

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}},
    "workers": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
}
OFFLOADING: dict[str, Any] = {
    "num_gpu_blocks_override": BLOCKS,
    "additional_config": {"scheduler_config": {"policies": [{"name": "offload_restore", "min_saved_tokens": 1}]}},
    "kv_transfer_config": connectors("offload"),
}
PROMPTS = [prompt(index, 29) + prompt(index, 29) for index in range(REQUESTS)]
"""Each says everything twice, so that n-grams find drafts."""


def main() -> None:
    model, shape = sys.argv[1:]
    undisturbed = start(model)
    expected = ask(undisturbed, PROMPTS, ANSWER)
    stop(undisturbed)
    engine = start(model, **SHAPES[shape], **OFFLOADING)
    watched = Drafts(scheduler_of(engine))
    tokens = ask(engine, PROMPTS, ANSWER)
    facts = {"exact": tokens == expected, "decisions": decisions(engine), "drafts": watched.counts}
    print(json.dumps(facts), flush=True)
    stop(engine)


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
