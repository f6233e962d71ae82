"""Runs the same requests on real vLLM engines, one after the other in this process, and prints what came out.

Usage: python real_engine.py MODEL SETTINGS, a JSON list of ``Setting``. The model runner is chosen by the environment.
The last line of output is a JSON list of facts.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

from schedloom.adapters.engine.reality.engines import keep_asynchronous_scheduling

BLOCK = 32
LENGTHS = [(230, 40), (200, 70), *((40 + 7 * i, 110 - 3 * i) for i in range(8))]
"""Tokens of each prompt and its answer: the end of a long one makes room for several short ones at once."""


class Setting(TypedDict, total=False):
    """``blocks``: how many the pool has; offloading is on. Without it the engine is vLLM's own, with room for all."""

    blocks: int
    asynchronous: bool
    multi: bool
    fault: str


def main() -> None:
    keep_asynchronous_scheduling()
    model, settings = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps([run(model, setting) for setting in settings]))


def run(model: str, setting: Setting) -> dict[str, Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = LLM(**arguments(model, setting))
    core: Any = engine.llm_engine.engine_core
    with FAULTS[setting.get("fault", "none")]():
        facts = observe(engine, core.engine_core.scheduler)
    core.shutdown()
    del engine, core
    gc.collect()
    cleanup_dist_env_and_memory()
    return facts


def observe(engine: Any, scheduler: Any) -> dict[str, Any]:
    seen = watch(scheduler)
    facts: dict[str, Any] = {"scheduler": type(scheduler).__name__, "outputs": generate(engine), "restored": seen}
    facts["groups"] = len(scheduler.kv_cache_config.kv_cache_groups)
    facts["runners"] = [scheduler.use_v2_model_runner, *engine.collective_rpc(has_second_runner)]
    if scheduler.connector is not None:
        books = connector_of(scheduler)._scheduler
        pool = scheduler.kv_cache_manager.block_pool
        facts["counters"] = dict(connector_of(scheduler).counters)
        facts["held"] = [pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), books.slots.count - books.slots.num_free]
    return facts


def has_second_runner(worker: Any) -> bool:
    """Whether a worker really computes with the second model runner."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    return isinstance(worker.model_runner, GPUModelRunner)


def arguments(model: str, setting: Setting) -> dict[str, Any]:
    common = {
        "model": model,
        "enforce_eager": True,
        "max_model_len": 10 * BLOCK,
        "kv_cache_memory_bytes": 64 << 20,
        "block_size": BLOCK,
        "dtype": "float32",
        "max_num_seqs": len(LENGTHS),
        "async_scheduling": setting.get("asynchronous", False),
        "disable_log_stats": False,
    }
    if "blocks" in setting:
        common |= {"num_gpu_blocks_override": setting["blocks"], **offloading(setting.get("multi", False))}
    return common


def offloading(multi: bool) -> dict[str, Any]:
    own = {
        "kv_connector": "PreemptOffloadConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"host_bytes": "64MiB"},
    }
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"connectors": [nixl, own]},
    }
    policy = {"name": "offload_restore", "min_saved_tokens": 1}
    return {
        "kv_transfer_config": both if multi else own,
        "additional_config": {"scheduler_config": {"policies": [policy]}},
    }


def generate(engine: Any) -> list[Any]:
    """Token ids and log-probabilities of every request."""
    from vllm import SamplingParams

    requests = [
        (
            {"prompt_token_ids": [32 + (i * 7 + j * (i + 3) + (j * j) % 11) % 90 for j in range(prompt)]},
            SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True, detokenize=False, logprobs=3),
        )
        for i, (prompt, answer) in enumerate(LENGTHS)
    ]
    prompts, sampling = map(list, zip(*requests, strict=True))
    answers = [request.outputs[0] for request in engine.generate(prompts, sampling, use_tqdm=False)]
    return [[list(answer.token_ids), list(map(_values, answer.logprobs))] for answer in answers]


def _values(logprobs: Any) -> list[Any]:
    return [(token, logprobs[token].logprob) for token in sorted(logprobs)]


def connector_of(scheduler: Any) -> Any:
    parts = (scheduler.connector, *getattr(scheduler.connector, "sub_connectors", ()))
    return next(part for part in parts if hasattr(part, "update_state_before_preempt"))


def watch(scheduler: Any) -> list[list[int]]:
    """For every restore the tokens that were saved, and how many loads were under way with it."""
    seen: list[list[int]] = []
    if scheduler.connector is None:
        return seen
    books = connector_of(scheduler)._scheduler
    allocated = books.allocated

    def watched(request: Any, blocks: Any, num_external_tokens: int) -> None:
        allocated(request, blocks, num_external_tokens)
        if num_external_tokens:
            saved = books._requests
            seen.append([saved[request.request_id].num_tokens, sum(each.phase.value == 3 for each in saved.values())])

    books.allocated = watched
    return seen


@contextlib.contextmanager
def changed_load(change: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
    """A connector that restores from other slots than those it saved to."""
    from schedloom.adapters.engine.offload.copier import BlockCopier
    from schedloom.adapters.engine.offload.metadata import BlockCopies

    load = BlockCopier.load

    def changed(self: Any, copies: BlockCopies) -> None:
        pairs = change(list(zip(copies.blocks, copies.slots, strict=True)))
        load(self, BlockCopies(copies.group, [block for block, _ in pairs], [slot for _, slot in pairs]))

    BlockCopier.load = changed  # type: ignore[method-assign]
    try:
        yield
    finally:
        BlockCopier.load = load  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "none": contextlib.nullcontext,
    "wrong block": lambda: changed_load(lambda pairs: [(block, 500) for block, _ in pairs]),
    "no tail": lambda: changed_load(lambda pairs: pairs[:-1]),
}

if __name__ == "__main__":
    main()
