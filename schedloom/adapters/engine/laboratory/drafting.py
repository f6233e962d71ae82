"""Speculative decoding: drafts that the model verifies, and rejects now and then."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from schedloom.adapters.engine.laboratory.runner import Plan, ProtocolError, Row, Runner

NUM_DRAFTS = 3
DRAFTED = 0xD2AF7ED0D2AF7ED0
"""What a drafter leaves in the slots ahead of what is computed: whoever reads it computes wrong tokens."""

UNKNOWN = 0
"""The token in place of a draft that nobody knows. The model never samples it."""


@dataclass(slots=True)
class Work:
    """One row in a step: ``count`` tokens from ``start`` on, then ``drafts``.

    Without ``start`` the device goes on where it is: the host does not know yet how many drafts were accepted.
    """

    row: int
    start: int | None
    count: int
    drafts: list[int]
    samples: bool


@dataclass(slots=True)
class DraftPlan(Plan):
    """``proposed`` holds the drafts for the step after, once this one is done."""

    work: list[Work] = field(default_factory=list)
    proposed: dict[str, list[int]] = field(default_factory=dict)


class Drafting(Runner):
    """Stands before a runner's protocol. Some drafts are right, some are not: which depends on nothing but the prefix.

    With asynchronous scheduling drafts stay on the device and the scheduler counts on all of them; a V2 runner keeps
    its own count in any case. A drafter that looks ahead writes KV to slots beyond the computed tokens.
    """

    def __init__(self, store: Any, arithmetic: Any, cell: Any) -> None:
        super().__init__(store, arithmetic, cell)
        self._ahead = NUM_DRAFTS if cell.variant == "eagle" else 0
        self._fixed = cell.asynchronous or bool(self._ahead)
        self._counts = cell.asynchronous or cell.runner == "v2"
        num_rows = len(self._tokens)
        self._goals = [0] * num_rows
        self._computed = [0] * num_rows
        self._drafts: list[list[int]] = [[] for _ in range(num_rows)]
        self.accepted = self.rejected = 0

    def _new_row(self, request_id: str, num_prompt_tokens: int, tokens: list[int]) -> Row:
        row = super()._new_row(request_id, num_prompt_tokens, tokens)
        self._goals[row.index] = row.length
        return row

    def _plan(self, output: Any) -> DraftPlan:
        plan = DraftPlan(list(output.num_scheduled_tokens))
        for request_id, count in output.num_scheduled_tokens.items():
            row = self.rows[request_id]
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            end = row.computed + count
            self._check_room(request_id, row, end + self._ahead)
            samples = end - len(drafts) >= self._goals[row.index]
            start = None if self._counts and row.written >= 0 else row.computed
            drafts = [UNKNOWN] * len(drafts) if row.written < 0 else list(drafts)
            plan.work.append(Work(row.index, start, count - len(drafts), drafts, samples))
            plan.sampling_ids += [request_id] if samples else []
            row.written, row.length = end, max(row.length, end + samples)
        return plan

    def _check_room(self, request_id: str, row: Row, end: int) -> None:
        for layers, count in zip(self.layers, row.num_blocks, strict=True):
            if count * layers.block_size < min(end, len(self.arithmetic.weights)):
                raise ProtocolError(f"{request_id} has no blocks for what its drafter writes up to token {end}")

    def _forward(self, plan: Plan) -> None:
        assert isinstance(plan, DraftPlan)
        names = iter(plan.sampling_ids)
        for work in plan.work:
            accepted = self._verify(plan, work, next(names)) if work.samples else self._compute(work)
            start = self._computed[work.row] if work.start is None else work.start
            self._computed[work.row] = start + work.count + accepted
        plan.done = True

    def _compute(self, work: Work) -> int:
        start = self._computed[work.row] if work.start is None else work.start
        first = start + work.count
        end = first + len(work.drafts)
        self._tokens[work.row, first:end] = work.drafts
        self._compute_run(work.row, start, end, True)
        return 0

    def _verify(self, plan: DraftPlan, work: Work, request_id: str) -> int:
        """How many of the drafts the model would have sampled itself."""
        if any(draft < 0 for draft in work.drafts):
            work.drafts = self._drafts[work.row][: len(work.drafts)]
        self._compute(work)
        start = self._computed[work.row] if work.start is None else work.start
        first = start + work.count
        ends = np.arange(first, first + len(work.drafts) + 1)
        reads = self._read(np.broadcast_to(work.row, ends.shape), ends)
        targets = self.arithmetic.next_tokens(reads).tolist()
        accepted = _agreed(work.drafts, targets)
        self._tokens[work.row, first : first + accepted + 1] = targets[: accepted + 1]
        plan.sampled.append(targets[: accepted + 1])
        plan.reads.append(reads[: accepted + 1].tolist())
        self.accepted += accepted
        self.rejected += len(work.drafts) - accepted
        plan.proposed[request_id] = self._propose(work.row, first + accepted, reads[accepted : accepted + 1])
        return accepted

    def _propose(self, row: int, position: int, state: Any) -> list[int]:
        """Drafts for the tokens behind the one that was sampled, which stands at ``position``."""
        drafts: list[int] = []
        token = self._tokens[row, position : position + 1]
        end = min(position + NUM_DRAFTS, len(self.arithmetic.weights))
        for place in range(position, end):
            state = self.arithmetic.after(state, np.array([place]), token)
            right = int(self.arithmetic.next_tokens(state)[0])
            if not self._fixed and right % 5 == 0:
                break
            drafts.append(right if right % 4 else UNKNOWN)
            token = np.array(drafts[-1:], np.uint64)
        if self._ahead:
            for layers in self.layers:
                layers.overwrite(row, np.arange(position, end), DRAFTED)
        self._drafts[row] = drafts + [UNKNOWN] * (NUM_DRAFTS - len(drafts))
        return drafts


def _agreed(drafts: list[int], targets: list[int]) -> int:
    pairs = zip(drafts, targets, strict=False)
    return next((place for place, (draft, target) in enumerate(pairs) if draft != target), len(drafts))
