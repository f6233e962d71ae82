"""The laboratory's runner models against vLLM's real model runner, told the same by a real engine. Run as a script.

Usage: python -m tests.engines.differential MODEL. The model runner comes from the environment. A synchronous and an
asynchronous engine, each with a pool that is too small for what it is asked, save, restore, compute again, cut prompts
into chunks and find prefixes. Every scheduler output is kept, with what the real model's forward pass then read and
wrote, which requests sampled, and in which order the runner saved, zeroed, copied and computed. The outputs are given
to the runner model as well, and to models that are broken on purpose. Prints one JSON object: what each engine met,
and in how many steps each model differs.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from schedloom.adapters.engine.laboratory.protocols import RunnerV1, RunnerV2
from schedloom.adapters.engine.laboratory.store import Arithmetic, Store
from schedloom.adapters.engine.reality.engines import BLOCK, connectors, keep_asynchronous_scheduling, start
from schedloom.conformance.cells import Cell
from schedloom.conformance.chain import Chain
from tests.engines.breakages import BROKEN
from tests.engines.inprocess import ask, decisions, prompt, stop

REQUESTS = 12
FOLLOW_UPS = 5
ANSWER = 20
BLOCKS = 17
CHUNK = 48
CELL = Cell(block_size=BLOCK, max_model_len=12 * BLOCK, max_num_seqs=16)
PROMPTS = [prompt(index, 26 + 9 * (index % 5)) for index in range(REQUESTS)]

TIGHT: dict[str, Any] = {
    "max_model_len": CELL.max_model_len,
    "num_gpu_blocks_override": BLOCKS,
    "max_num_batched_tokens": 4 * CHUNK,
    "long_prefill_token_threshold": CHUNK,
    "additional_config": {"scheduler_config": {"policies": [{"name": "offload_restore", "min_saved_tokens": 56}]}},
    "kv_transfer_config": connectors("offload"),
}
"""Requests with fewer than 56 computed tokens are computed again."""

Row = tuple[tuple[int, ...], ...]
"""Of one request in one step: its tokens, their positions, the slots that are written and the blocks that are read."""


@dataclass
class Step:
    output: Any
    rows: set[Row] = field(default_factory=set)
    sampled: dict[str, list[int]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    @property
    def seen(self) -> tuple[Any, ...]:
        return self.rows, set(self.sampled), self.order


class Recorder:
    """Writes down what an engine's runner is told and does. New blocks are zeroed, and one of them copied to itself,
    so that there is an order to see: this model alone would ask for neither."""

    def __init__(self, engine: Any) -> None:
        core = engine.llm_engine.engine_core.engine_core
        self.steps: list[Step] = []
        self._by_output: dict[int, Step] = {}
        self._execute, core.model_executor.execute_model = core.model_executor.execute_model, self._executed
        self._update, core.scheduler.update_from_output = core.scheduler.update_from_output, self._updated
        worker = core.model_executor.driver_worker
        self._watch(getattr(worker, "worker", worker).model_runner)

    def _watch(self, runner: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        module: Any = importlib.import_module(_defining(type(runner)))
        connector.handle_preemptions = self._noting("save", connector.handle_preemptions)
        module.copy_kv_cache_blocks_inplace = self._noting("copy", module.copy_kv_cache_blocks_inplace)
        if hasattr(runner, "kv_block_zeroer"):
            runner.kv_block_zeroer.zero_block_ids = self._noting("zero", lambda blocks: _zero(runner, blocks))
        else:
            runner._zero_block_ids = self._noting("zero", runner._zero_block_ids)
        runner.model.register_forward_pre_hook(self._called, with_kwargs=True)

    def _noting(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            self.steps[-1].order.append(what)
            return call(*arguments)

        return noted

    def _executed(self, output: Any, *arguments: Any, **keywords: Any) -> Any:
        if output.new_block_ids_to_zero:
            block = output.new_block_ids_to_zero[0]
            output.kv_cache_block_copies = [(block, block)]
        self.steps.append(Step(copy.deepcopy(output)))
        self._by_output[id(output)] = self.steps[-1]
        return self._execute(output, *arguments, **keywords)

    def _updated(self, output: Any, produced: Any) -> Any:
        sampled = zip(produced.req_ids, produced.sampled_token_ids, strict=True)
        self._by_output.pop(id(output)).sampled = {name: list(tokens) for name, tokens in sampled if len(tokens)}
        return self._update(output, produced)

    def _called(self, model: Any, arguments: Any, keywords: Any) -> None:
        from vllm.forward_context import get_forward_context

        metadata = next(iter(get_forward_context().attn_metadata.values()))
        tokens, positions = keywords["input_ids"].tolist(), keywords["positions"].tolist()
        slots, starts = metadata.slot_mapping.tolist(), metadata.query_start_loc.tolist()
        step = self.steps[-1]
        step.order.append("forward")
        for place in range(len(step.output.num_scheduled_tokens)):
            part = slice(starts[place], starts[place + 1])
            blocks = metadata.block_table[place, : -(-int(metadata.seq_lens[place]) // BLOCK)].tolist()
            step.rows.add((tuple(tokens[part]), tuple(positions[part]), tuple(slots[part]), tuple(blocks)))


def _defining(runner: type[Any]) -> str:
    """The module in which vLLM's runner for GPUs, which that for CPUs derives from, looks its functions up."""
    return next(base.__module__ for base in runner.__mro__ if base.__name__ == "GPUModelRunner")


def _zero(runner: Any, blocks: list[int]) -> None:
    """The second runner's own way is a kernel on addresses of a device."""
    for cache in runner.kv_caches:
        cache[blocks] = 0


def zero_new_blocks() -> None:
    """Engines that start from now on zero new blocks, as those do that have Mamba layers."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    KVCacheConfig.needs_kv_cache_zeroing = property(lambda config: True)


def record(model: str, asynchronous: bool) -> tuple[list[Step], dict[str, int]]:
    """Everybody at once, then the next turns of those whose KV is the youngest."""
    engine = start(model, asynchronous, **TIGHT)
    recorder = Recorder(engine)
    replies = ask(engine, PROMPTS, ANSWER)
    turns = [first + reply + prompt(99, 9) for first, reply in zip(PROMPTS, replies, strict=True)]
    ask(engine, turns[: -FOLLOW_UPS - 1 : -1], ANSWER)
    restored = decisions(engine).get("preempt_offload RESTORES", 0)
    stop(engine)
    return recorder.steps, met(recorder.steps) | {"restored": restored}


def met(steps: list[Step]) -> dict[str, int]:
    facts, owners = Counter[str](), defaultdict[int, set[str]](set)
    for step in steps:
        output = step.output
        facts["steps"] += bool(output.num_scheduled_tokens)
        facts["preempted"] += len(output.preempted_req_ids or ())
        facts["sampled"] += len(step.sampled)
        facts["chunks"] += len(output.num_scheduled_tokens.keys() - step.sampled.keys())
        for new in output.scheduled_new_reqs:
            facts["prefix hits"] += bool(new.num_computed_tokens)
            for block in new.block_ids[0]:
                owners[block].add(new.req_id)
    facts["blocks used again"] = sum(len(names) > 1 for names in owners.values())
    return dict(facts)


class Replaying:
    """Stands before a runner model, which then samples what it is told to, and notes what it does."""

    def __init__(self: Any, asynchronous: bool) -> None:
        self.given: dict[str, list[int]] = {}
        self.order: list[str] = []
        store = _NotingStore(BLOCKS, BLOCK, 0)
        store.order = self.order
        arithmetic = Arithmetic(Chain(), CELL.max_model_len)
        cell = replace(CELL, asynchronous=asynchronous)
        super().__init__(store, arithmetic, cell)  # type: ignore[call-arg]
        self.handle_preemptions = self._save

    def _save(self: Any, output: Any) -> None:
        """Copies to the host are ordered after the device's work."""
        self.synchronise()
        self.order.append("save")

    def _forward(self: Any, plan: Any) -> None:
        if plan.request_ids:
            self.order.append("forward")
        super()._forward(plan)  # type: ignore[misc]

    def _sample(self: Any, plan: Any, samples: Any) -> None:
        for name, (row, end) in zip(plan.sampling_ids, samples.tolist(), strict=True):
            self._tokens[row, end] = self.given.get(name, [0])[0]

    def replay(self: Any, step: Step) -> tuple[Any, ...]:
        """What the model makes of a step: as ``Step.seen``."""
        self.given = step.sampled
        self.order.clear()
        plan = self.dispatch(step.output)
        rows = {self._row(name, count) for name, count in step.output.num_scheduled_tokens.items()}
        self.synchronise()
        return rows, set(plan.sampling_ids), list(self.order)

    def _row(self: Any, name: str, count: int) -> Row:
        row = self.rows[name]
        positions = range(row.computed, row.computed + count)
        table = self.layers[0].tables[row.index].tolist()
        slots = tuple(table[position // BLOCK] * BLOCK + position % BLOCK for position in positions)
        tokens = tuple(self._tokens[row.index, positions.start : positions.stop].tolist())
        return tokens, tuple(positions), slots, tuple(table[: -(-positions.stop // BLOCK)])


class _NotingStore(Store):
    order: list[str]

    def zero(self, blocks: list[int]) -> None:
        self.order.append("zero")
        super().zero(blocks)

    def copy(self, copies: list[tuple[int, int]]) -> None:
        self.order.append("copy")
        super().copy(copies)


def differences(runner: Any, steps: list[Step]) -> list[str]:
    """A word on each step in which ``runner`` does something else. One that cannot go on ends it."""
    found: list[str] = []
    for number, step in enumerate(steps):
        try:
            seen = runner.replay(step)
        except Exception as error:
            return [*found, f"step {number}: {type(error).__name__}: {error}"]
        if seen != step.seen:
            found.append(f"step {number}: the model {seen}, the real runner {step.seen}")
    return found


def main() -> None:
    model = sys.argv[1]
    keep_asynchronous_scheduling()
    zero_new_blocks()
    version = "v2" if os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1" else "v1"
    kind = RunnerV2 if version == "v2" else RunnerV1
    facts: dict[str, Any] = {}
    for mode in ("sync", "async"):
        steps, seen = record(model, mode == "async")
        found = differences(type("Model", (Replaying, kind), {})(mode == "async"), steps)
        broken = {
            name: len(differences(type(name, (Replaying, fault, kind), {})(mode == "async"), steps))
            for name, fault in BROKEN[version].items()
        }
        facts[mode] = {"met": seen, "differences": found[:3], "number": len(found), "broken": broken}
    print(json.dumps({"facts": facts}), flush=True)


if __name__ == "__main__":
    main()
