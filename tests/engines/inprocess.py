"""Real engines inside this process, one after the other: what the scripts of this folder share."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

from schedloom.adapters.engine.reality.engines import scheduler_of
from schedloom.core.wire import JOB_CLASS_KEY


def stop(engine: Any) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()


def add(engine: Any, name: str, tokens: list[int], sampling: Any, **more: Any) -> None:
    engine.llm_engine.add_request(name, {"prompt_token_ids": tokens}, sampling, **more)


def drain(engine: Any) -> dict[str, list[int]]:
    """Step until nobody is left: token ids by the name that each request was added under."""
    produced: dict[str, list[int]] = {}
    while engine.llm_engine.has_unfinished_requests():
        for output in engine.llm_engine.step():
            if output.finished:
                produced[output.request_id] = list(output.outputs[0].token_ids)
    return produced


def ask(engine: Any, prompts: Iterable[list[int]], answer: int) -> list[list[int]]:
    """The answers to ``prompts``, which arrive together, of ``answer`` tokens each."""
    names = []
    for index, tokens in enumerate(prompts):
        add(engine, f"ask-{index}", tokens, sampling(answer))
        names.append(f"ask-{index}")
    produced = drain(engine)
    return [produced[name] for name in names]


def sampling(answer: int, **extra: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra or None)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(32, 122), k=length)


class Bench:
    """An engine, and what its scheduler gave to its model runner in every step."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.scheduler = scheduler_of(engine)
        self.steps: list[dict[str, Any]] = []
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}

    def __enter__(self) -> Bench:
        self._schedule, self.scheduler.schedule = self.scheduler.schedule, self._watched
        return self

    def __exit__(self, *error: object) -> None:
        self.scheduler.schedule = self._schedule

    def add(
        self, name: str, tokens: list[int], answer: int, session: str | None = None, job: str | None = None
    ) -> None:
        extra = {JOB_CLASS_KEY: job} if job else {}
        add(self.engine, name, tokens, sampling(answer, **extra), session_id=session)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.engine.llm_engine.step():
                if output.finished:
                    self.tokens[output.request_id] = list(output.outputs[0].token_ids)
                    self.cached[output.request_id] = output.num_cached_tokens

    def drain(self) -> None:
        while self.engine.llm_engine.has_unfinished_requests():
            self.step()

    def _watched(self, *arguments: Any) -> Any:
        output = self._schedule(*arguments)
        step: dict[str, Any] = {"new": [named(each.req_id) for each in output.scheduled_new_reqs]}
        step |= {"prefill": {}, "decode": []}
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            if request.num_computed_tokens - tokens < request.num_prompt_tokens - 1:
                step["prefill"][named(request_id)] = tokens
            else:
                step["decode"].append(named(request_id))
        self.steps.append(step)
        return output


def named(request_id: str) -> str:
    """The name that a request was added under: vLLM appends a random part."""
    return request_id.rpartition("-")[0]


def decisions(engine: Any) -> dict[str, int]:
    """How often each verdict of each policy was carried out."""
    counts: Counter[str] = Counter()
    if hasattr(scheduler_of(engine), "decisions"):
        for (policy, _, verdict, _), number in scheduler_of(engine).decisions.counts.items():
            counts[f"{policy} {verdict}"] += number
    return dict(counts)
