"""The whole chain inside one request, many times, on real Decoders in this process. Run as a script.

Usage: python -m tests.engines.chain MODEL CHAINS. The model runner, and where decisions are written, come from the
environment. In a wave each session has a first turn; then the second turns arrive together as marked attempts,
behind one long prompt that is prefilled in chunks: it grows until nearly all attempts have lost their blocks to it.
Prints one JSON object: for every attempt its id, its token ids, and those of an undisturbed engine.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from schedloom.adapters.engine.reality.engines import (
    BLOCK,
    connectors,
    keep_asynchronous_scheduling,
    scheduler_of,
    start,
)
from schedloom.core.wire import LOCAL_ATTEMPT_KEY, PROTOCOL_VERSION
from tests.engines.inprocess import add, ask, drain, prompt, sampling, stop

SESSIONS = 24
FIRST_TURN = (40, 3)
APPENDED = 24
ANSWER = 18
BLOCKS_OF_ATTEMPT = 3
BLOCKS = SESSIONS * BLOCKS_OF_ATTEMPT + 12
LONG_PROMPT = (BLOCKS - 4) * BLOCK
CHUNK = 8 * BLOCK
WAVES = 10

POLICIES = [
    {"name": "append_prefill", "min_reused_tokens": BLOCK},
    {"name": "offload_restore", "min_saved_tokens": 1},
]


def main() -> None:
    model, chains = sys.argv[1], int(sys.argv[2])
    keep_asynchronous_scheduling()
    attempts = [attempt for mode in ("sync", "async") for attempt in disturbed(model, -(-chains // 2), mode)]
    answers = undisturbed(model, [attempt["prompt"] for attempt in attempts])
    for attempt, answer in zip(attempts, answers, strict=True):
        attempt["undisturbed"] = answer
        del attempt["prompt"]
    print(json.dumps(attempts))


def disturbed(model: str, chains: int, mode: str) -> list[dict[str, Any]]:
    """Waves of attempts, until ``chains`` restores have happened."""
    engine = start(model, mode == "async", **decoder(POLICIES))
    counts = scheduler_of(engine).decisions.counts
    attempts: list[dict[str, Any]] = []
    for wave in range(WAVES):
        attempts += one_wave(engine, wave, mode)
        if counts["preempt_offload", "store", "RESTORES", "restores"] >= chains:
            break
    stop(engine)
    return attempts


def one_wave(engine: Any, wave: int, mode: str) -> list[dict[str, Any]]:
    length, reply_tokens = FIRST_TURN
    firsts = [prompt(wave * SESSIONS + session, length) for session in range(SESSIONS)]
    histories = [
        first + reply + prompt(10_002, APPENDED)
        for first, reply in zip(firsts, ask(engine, firsts, reply_tokens), strict=True)
    ]
    named = {f"{mode}-{wave}-{session}": history for session, history in enumerate(histories)}
    produced = attempt(engine, named)
    return [{"id": name, "prompt": history, "tokens": produced[name]} for name, history in named.items()]


def attempt(engine: Any, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Marked requests all at once, and somebody else's long prompt before them."""
    add(engine, "long-prompt", prompt(10_001, LONG_PROMPT), sampling(1))
    for name, tokens in prompts.items():
        add(engine, name, tokens, sampling(ANSWER, **{LOCAL_ATTEMPT_KEY: PROTOCOL_VERSION}))
    return drain(engine)


def undisturbed(model: str, prompts: list[list[int]]) -> list[list[int]]:
    """On vLLM's own scheduler, with room for all and without any reuse."""
    engine = start(model, enable_prefix_caching=False, max_num_seqs=SESSIONS)
    answers = ask(engine, prompts, ANSWER)
    stop(engine)
    return answers


def decoder(policies: list[dict[str, Any]]) -> dict[str, Any]:
    """Settings of a Decoder whose pool holds all attempts, or the long prompt."""
    return {
        "num_gpu_blocks_override": BLOCKS,
        "max_model_len": BLOCKS * BLOCK - BLOCK,
        "max_num_seqs": SESSIONS + 1,
        "max_num_batched_tokens": 2048,
        "long_prefill_token_threshold": CHUNK,
        "additional_config": {"scheduler_config": {"policies": policies}},
        "kv_transfer_config": connectors("both"),
    }


if __name__ == "__main__":
    main()
