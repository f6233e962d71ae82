"""The whole chain inside one request, many times, on one real Decoder in this process. Run as a script.

Usage: python chain.py MODEL CHAINS. The model runner, and where decisions are written, come from the environment.
Sessions have a first turn; their second turns arrive together as marked attempts, with answers so long that the pool
cannot hold them all. Prints one JSON object: for every attempt its id, its token ids, and those of an undisturbed
engine.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

from schedloom.core.wire import LOCAL_ATTEMPT_KEY, PROTOCOL_VERSION

BLOCK = 32
BLOCKS = 36
SESSIONS = 6
FIRST_TURN = (130, 8)
APPENDED = 20
ANSWER = 90
WAVES = 60

POLICIES = {
    "policies": [
        {"name": "append_prefill", "min_reused_tokens": 32},
        {"name": "offload_restore", "min_saved_tokens": 1},
    ]
}


def main() -> None:
    model, chains = sys.argv[1], int(sys.argv[2])
    attempts = disturbed(model, chains)
    answers = undisturbed(model, [attempt["prompt"] for attempt in attempts])
    for attempt, answer in zip(attempts, answers, strict=True):
        attempt["undisturbed"] = answer
        del attempt["prompt"]
    print(json.dumps(attempts))


def disturbed(model: str, chains: int) -> list[dict[str, Any]]:
    """Waves of attempts, until ``chains`` restores have happened."""
    engine = start(model, **decoder())
    scheduler: Any = engine.llm_engine.engine_core.engine_core.scheduler
    attempts: list[dict[str, Any]] = []
    for wave in range(WAVES):
        attempts += one_wave(engine, wave)
        if scheduler.decisions.counts["preempt_offload", "store", "RESTORES", "restores"] >= chains:
            break
    stop(engine)
    return attempts


def one_wave(engine: Any, wave: int) -> list[dict[str, Any]]:
    length, answer = FIRST_TURN
    firsts = [prompt(wave * SESSIONS + session, length) for session in range(SESSIONS)]
    histories = [
        first + reply + prompt(7, APPENDED) for first, reply in zip(firsts, ask(engine, firsts, answer), strict=True)
    ]
    ids = [f"attempt-{wave}-{session}" for session in range(SESSIONS)]
    produced = attempt(engine, ids, histories)
    return [
        {"id": name, "prompt": history, "tokens": produced[name]} for name, history in zip(ids, histories, strict=True)
    ]


def attempt(engine: Any, ids: list[str], prompts: list[list[int]]) -> dict[str, list[int]]:
    """Marked requests with ids of ours, all at once."""
    marked = sampling(ANSWER, {LOCAL_ATTEMPT_KEY: PROTOCOL_VERSION})
    for name, tokens in zip(ids, prompts, strict=True):
        engine.llm_engine.add_request(name, {"prompt_token_ids": tokens}, marked)
    produced: dict[str, list[int]] = {}
    while engine.llm_engine.has_unfinished_requests():
        for output in engine.llm_engine.step():
            if output.finished:
                produced[output.request_id] = list(output.outputs[0].token_ids)
    return produced


def undisturbed(model: str, prompts: list[list[int]]) -> list[list[int]]:
    """On vLLM's own scheduler, with room for all and without any reuse."""
    engine = start(model, enable_prefix_caching=False)
    answers = ask(engine, prompts, ANSWER)
    stop(engine)
    return answers


def ask(engine: Any, prompts: list[list[int]], answer: int) -> list[list[int]]:
    requests = [{"prompt_token_ids": tokens} for tokens in prompts]
    outputs = engine.generate(requests, sampling(answer), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def sampling(answer: int, extra: dict[str, Any] | None = None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra)


def prompt(seed: int, length: int) -> list[int]:
    return [32 + (seed * 31 + index * 7 + index * index // (3 + seed % 5)) % 90 for index in range(length)]


def decoder() -> dict[str, Any]:
    """A Decoder as an operator configures one: NIXL and the offload connector side by side."""
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    offload = {"kv_connector": "PreemptOffloadConnector", "kv_role": "kv_consumer"}
    offload["kv_connector_extra_config"] = {"host_bytes": "64MiB"}  # type: ignore[assignment]
    return {
        "num_gpu_blocks_override": BLOCKS,
        "additional_config": {"scheduler_config": POLICIES},
        "kv_transfer_config": {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": {"connectors": [nixl, offload]},
        },
    }


def start(model: str, **settings: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=model,
        enforce_eager=True,
        max_model_len=20 * BLOCK,
        kv_cache_memory_bytes=64 << 20,
        block_size=BLOCK,
        dtype="float32",
        max_num_seqs=16,
        disable_log_stats=False,
        **settings,
    )


def stop(engine: Any) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
