"""How evenly eight streams go on while a long append joins them, with tpot_guard and without. Run as a script.

Usage: python -m tests.engines.pace MODEL ROUNDS. One engine: in every other round the guard is switched off, as an
operator can switch it. The bound is stated in quick steps without prefill, because machines differ. Prints one JSON
object, times in milliseconds: the bound, and for each round what its steps took before the append came and then up to
the append's first token, and how long the append waited for it.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import quantiles
from typing import Any

from schedloom.adapters.engine.reality.engines import scheduler_of, start
from tests.engines.inprocess import add, drain, prompt, sampling, stop

STREAMS = 8
BEFORE = 16
"""Steps of the streams alone in each round."""
STREAM_TOKENS = 90
APPEND = 1024
BOUND_IN_STEPS = 4.0


def main() -> None:
    model, rounds = sys.argv[1], int(sys.argv[2])
    section = {"scheduler_config": {"policies": [{"name": "tpot_guard", "min_chunk_tokens": 16}]}}
    engine = start(model, max_model_len=2048, kv_cache_memory_bytes=128 << 20, additional_config=section)
    play(engine, 0)
    bound = BOUND_IN_STEPS * quantiles([*play(engine, 1)["before"], *play(engine, 2)["before"]])[0]
    set_bound(engine, bound)
    facts: dict[str, Any] = {"bound": bound, "on": [], "off": []}
    for number in range(rounds):
        for mode in ("off", "on"):
            switch(engine, mode)
            facts[mode].append(play(engine, 2 * number + 3 + (mode == "on")))
    stop(engine)
    print(json.dumps(facts))


def play(engine: Any, number: int) -> dict[str, Any]:
    """One round: its steps before the append came, those up to its first token, and the time to that token."""
    for stream in range(STREAMS):
        add(engine, f"stream-{stream}", prompt(100 * number + stream, 20), sampling(STREAM_TOKENS))
    engine.llm_engine.step()
    before = [timed_step(engine)[0] for _ in range(BEFORE)]
    add(engine, "append", prompt(100 * number + 50, APPEND), sampling(1))
    beside: list[float] = []
    names: list[str] = []
    while "append" not in names:
        milliseconds, names = timed_step(engine)
        beside.append(milliseconds)
    drain(engine)
    return {"before": before, "beside": beside, "ttft": sum(beside)}


def timed_step(engine: Any) -> tuple[float, list[str]]:
    began = time.perf_counter()
    outputs = engine.llm_engine.step()
    return (time.perf_counter() - began) * 1000, [output.request_id for output in outputs]


def set_bound(engine: Any, milliseconds: float) -> None:
    (guard,) = scheduler_of(engine).policies.policies
    guard.settings = guard.settings.model_copy(update={"tpot_ms": milliseconds})


def switch(engine: Any, mode: str) -> None:
    for caller in scheduler_of(engine)._callers:
        caller.set_modes({"tpot_guard": mode})


if __name__ == "__main__":
    main()
