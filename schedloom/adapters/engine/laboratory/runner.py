"""Model runners that know nothing but what a ``SchedulerOutput`` tells them.

They keep block tables and tokens as the real runners do, write a KV record for every token they are asked to compute,
and sample by reading back every record of the sequence through the block table. The host side runs when a step is
dispatched; the device side is a queue of work that runs, in order, when the device gets to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from schedloom.adapters.engine.laboratory.layers import Known, build_layers, read_all
from schedloom.adapters.engine.laboratory.store import Arithmetic, Numbers, Store, Words

SPARE_ROWS = 3
"""Rows of the batch for each sequence that may run: a row given back waits until the device is past its last use."""


class ProtocolError(Exception):
    """The scheduler told the runner something that the runner cannot carry out."""


@dataclass(slots=True)
class Row:
    """One request in the batch. ``length`` counts the tokens it will have when all dispatched work is done;
    ``written`` is how far its KV will then be written by this runner, or -1 when it must be read first;
    ``num_blocks`` counts the blocks in its table of each KV cache group."""

    index: int
    num_prompt_tokens: int
    length: int
    num_blocks: list[int]
    computed: int = 0
    written: int = -1


@dataclass(slots=True)
class Plan:
    """The device side of one step: which rows compute which tokens, and which sample. For each that samples there are
    the tokens ``sampled``, and in ``reads`` the state that was read for each of them."""

    request_ids: list[str] = field(default_factory=list)
    steady: list[tuple[int, int]] = field(default_factory=list)
    runs: list[tuple[int, int, int, bool]] = field(default_factory=list)
    samples: list[tuple[int, int]] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    sampling_ids: list[str] = field(default_factory=list)
    done: bool = False


class Runner:
    """What both protocols share. ``_update`` is the protocol: it brings the rows in line with a scheduler's output."""

    def __init__(self, store: Store, arithmetic: Arithmetic, cell: Any) -> None:
        self.store = store
        self.arithmetic = arithmetic
        self.asynchronous = cell.asynchronous
        limit = len(arithmetic.weights)
        num_rows = SPARE_ROWS * cell.max_num_seqs + 1
        self.rows: dict[str, Row] = {}
        self._free = list(range(num_rows))
        self.layers = build_layers(cell.groups, store, arithmetic, num_rows)
        self._tokens: Words = np.zeros((num_rows, limit + 1), np.uint64)
        self._states: Words = np.zeros(num_rows, np.uint64)
        self._starts: Words = np.zeros(num_rows, np.uint64)
        self._known = Known(self._tokens, self._starts)
        self.starts: dict[str, int] = {}
        self._device: deque[Callable[[], None]] = deque()
        self.handle_preemptions: Callable[[Any], None] = lambda output: None

    # Host side

    def dispatch(self, output: Any) -> Plan:
        """Take a scheduler's output over. Raises ProtocolError when it makes no sense to a runner."""
        try:
            self._update(output)
            plan = self._plan(output)
        except (KeyError, IndexError) as error:
            raise ProtocolError(f"{type(error).__name__}: {error}") from error
        self._device.append(lambda: self._forward(plan))
        return plan

    def _update(self, output: Any) -> None:
        raise NotImplementedError

    def _plan(self, output: Any) -> Plan:
        plan = Plan(list(output.num_scheduled_tokens))
        for request_id, count in output.num_scheduled_tokens.items():
            row = self.rows[request_id]
            start, end = row.computed, row.computed + count
            if count == 1 and row.written == start:
                plan.steady.append((row.index, start))
            else:
                plan.runs.append((row.index, start, end, row.written != start))
            row.written = end
            # A token that this runner was never told is computed all the same, from the zero that stands in its place.
            row.length = max(row.length, end)
            if end == row.length:
                plan.samples.append((row.index, end))
                plan.sampling_ids.append(request_id)
                row.length += 1
        return plan

    def _new_row(self, request_id: str, num_prompt_tokens: int, tokens: list[int]) -> Row:
        if not self._free:
            self.synchronise()
        row = Row(self._free.pop(), num_prompt_tokens, len(tokens), [0] * len(self.layers))
        self._tokens[row.index, : row.length] = tokens
        self._starts[row.index] = self.starts.get(request_id, self.arithmetic.start[0])
        self.rows[request_id] = row
        return row

    def _set_blocks(self, row: Row, blocks: Iterable[Sequence[int]]) -> None:
        for layers in self.layers:
            layers.tables[row.index] = 0
        row.num_blocks = [0] * len(self.layers)
        self._append_blocks(row, blocks)

    def _append_blocks(self, row: Row, blocks: Iterable[Sequence[int]]) -> None:
        for group, (layers, added) in enumerate(zip(self.layers, blocks, strict=True)):
            end = row.num_blocks[group] + len(added)
            layers.tables[row.index, row.num_blocks[group] : end] = added
            row.num_blocks[group] = end

    def _blocks_of(self, row: Row) -> list[list[int]]:
        pairs = zip(self.layers, row.num_blocks, strict=True)
        return [layers.tables[row.index, :count].tolist() for layers, count in pairs]

    def _retire(self, request_id: str) -> None:
        row = self.rows.pop(request_id, None)
        if row is not None:
            self._device.append(lambda: self._free.append(row.index))

    def _prepare_blocks(self, output: Any) -> None:
        """Zero new blocks and make copy-on-write copies: device work, in the order of the stream."""
        zeroed, copies = output.new_block_ids_to_zero, output.kv_cache_block_copies
        if zeroed:
            self._device.append(lambda: self.store.zero(zeroed))
        if copies:
            self._device.append(lambda: self.store.copy(copies))

    # Device side

    def synchronise(self, plan: Plan | None = None) -> None:
        """Let the device run until ``plan`` is done, or until it is idle."""
        while self._device and (plan is None or not plan.done):
            self._device.popleft()()

    def _forward(self, plan: Plan) -> None:
        if plan.steady:
            self._compute_steady(np.array(plan.steady))
        for run in plan.runs:
            self._compute_run(*run)
        if plan.samples:
            self._sample(plan, np.array(plan.samples))
        plan.done = True

    def _compute_steady(self, steady: Numbers) -> None:
        rows, starts = steady[:, 0], steady[:, 1]
        states = self._states[rows]
        records = self.arithmetic.records(states, self._tokens[rows, starts])
        self._states[rows] = states + self.arithmetic.weights[starts] * records
        for layers in self.layers:
            layers.write(rows, starts, records, self._states[rows])

    def _compute_run(self, row: int, start: int, end: int, read: bool) -> None:
        state = self._read(np.array([row]), np.array([start]), next_token=True) if read else self._states[row : row + 1]
        records, after = self.arithmetic.run(state, start, self._tokens[row, start:end])
        positions = self.arithmetic.positions[start:end]
        for layers in self.layers:
            layers.write(row, positions, records, after)
        self._states[row] = after[-1]

    def _sample(self, plan: Plan, samples: Numbers) -> None:
        rows, ends = samples[:, 0], samples[:, 1]
        reads = self._read(rows, ends)
        tokens = self.arithmetic.next_tokens(reads)
        self._tokens[rows, ends] = tokens
        plan.sampled = [[token] for token in tokens.tolist()]
        plan.reads = [[read] for read in reads.tolist()]

    def _read(self, rows: Numbers, lengths: Numbers, next_token: bool = False) -> Words:
        return read_all(self.layers, rows, lengths, self._known, next_token)
