"""What is checked after every step, beside the outputs."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from schedloom.conformance.cells import Cell
from schedloom.conformance.laboratory import Engine, Preemption, Report
from schedloom.conformance.ledger import Accuse, Entry, Ledger
from schedloom.conformance.promises import Promises

OVERTAKES_PER_SEAT = 8
"""A request may be overtaken by this many later ones for each sequence that can run at a time."""

CENSUS_EVERY = 4
"""Steps from one count of all blocks to the next: an owner too many or too few stays wrong until it is counted."""

NOBODYS = (None, 0)
"""The salt and the adapter of all that was written before somebody came with one."""

IDLE_LIMIT = 64
"""Steps in which nothing is scheduled although a request could be."""


class Oracles:
    """Watches one engine's steps, accuses, and counts what happened."""

    promises: Promises | None = None

    def __init__(self, cell: Cell, engine: Engine, ledger: Ledger, accuse: Accuse) -> None:
        self._cell = cell
        self._engine = engine
        self._ledger = ledger
        self._accuse = accuse
        self.events: Counter[str] = Counter()
        self.salted = False
        self._writers: dict[int, tuple[str | None, int]] = {}
        self._idle = 0
        self._steps = 0

    def after_step(self, report: Report, squeezed: bool, paused: str = "", throttled: bool = False) -> None:
        self._budget(report)
        self._axes(report)
        for preemption in report.preemptions:
            self._preempted(preemption)
        if self.promises is not None:
            self.promises.after_step(report, squeezed or bool(paused) or self._engine.silent, throttled)
        if paused:
            self._at_rest(report, paused)
        if report.admitted:
            self._admitted(report)
        if self.salted:
            for request_id, blocks in report.blocks.items():
                self._note_writer(request_id, blocks)
        self._steps += 1
        if self._steps % CENSUS_EVERY == 0 or not report.scheduled:
            self.count_blocks()
        self._liveliness(report, squeezed or bool(paused))

    def _axes(self, report: Report) -> None:
        """What an axis of the cell must bring about, or the axis tries nothing."""
        self.events["zeroed"] += report.zeroed
        if self._cell.drafts:
            self.events["draft accepted"], self.events["draft rejected"] = self._engine.drafts
        if self._cell.slides:
            self.events["block behind the window"] += sum(
                0 in table for request in report.scheduled for table in self._engine.blocks_of(request)
            )

    def _budget(self, report: Report) -> None:
        total = sum(report.scheduled.values())
        if total > self._cell.token_budget:
            self._accuse("BUD-1", f"{total} tokens in a step of {self._cell.token_budget}")
        running = self._engine.num_running
        if running > self._cell.max_num_seqs:
            self._accuse("BUD-1", f"{running} sequences run where {self._cell.max_num_seqs} may")
        if total == self._cell.token_budget or running == self._cell.max_num_seqs:
            self.events["full batch"] += 1

    def _preempted(self, preemption: Preemption) -> None:
        name, reset = preemption.request_id, preemption.reset
        self._ledger.entries[name].preempted = True
        self.events["preempted by a reset" if reset else "preempted"] += 1
        if preemption.deferred and not reset:
            self._accuse("LIVE-2", f"{name} was preempted although a step in flight fences its blocks")
        if preemption.uncomputed:
            blocks = f"{preemption.uncomputed} blocks"
            self._accuse("KV-3", f"{name} was preempted, and {blocks} that it never computed are in the prefix cache")

    def _admitted(self, report: Report) -> None:
        """In the order of scheduling: a request may join with blocks that one before it fills in the same step."""
        for request_id in report.scheduled:
            entry = self._ledger.entries[request_id]
            if request_id in report.admitted:
                computed = report.admitted[request_id]
                shared = self._shared(report, request_id, computed) if self.salted else []
                self._joined(entry, computed, shared, report.now)
            if self.salted and request_id in report.blocks:
                self._note_writer(request_id, report.blocks[request_id])

    def _shared(self, report: Report, request_id: str, computed: int) -> list[int]:
        """The blocks that hold the tokens that a request joins with."""
        pairs = zip(report.blocks[request_id], self._cell.groups, strict=True)
        return [block for table, group in pairs for block in table[: computed // group.block_size] if block]

    def _joined(self, entry: Entry, computed: int, shared: list[int], now: float) -> None:
        received = entry.order.transfer == "receive"
        if entry.preempted:
            self.events["resumed"] += bool(entry.tokens)
        elif computed and not received:
            self.events["prefix hit"] += 1
        restored = entry.preempted and self._cell.offload
        if shared and not received and not restored:
            self._check_writers(entry, shared)
        if not entry.held:
            entry.held = True
            self.events["admitted local attempt"] += entry.order.marked
            self._count_overtakes(entry)
            if self.promises is not None:
                self.promises.admitted(entry, computed, now)

    def _count_overtakes(self, entry: Entry) -> None:
        if self._cell.priority:
            return
        bound = OVERTAKES_PER_SEAT * self._cell.max_num_seqs
        for other in self._ledger.open.values():
            if other.order.arrival >= entry.order.arrival:
                break
            # Adapters wait for a place in the batch, which vLLM gives to nobody in turn.
            if other.held or other.order.transfer == "receive" or other.order.adapter:
                continue
            other.overtaken += 1
            self.events["overtaken"] += 1
            if other.overtaken > bound:
                self._accuse("FAIR-1", f"{other.order.request_id} was overtaken {other.overtaken} times")

    def _check_writers(self, entry: Entry, shared: list[int]) -> None:
        owner = _owner(entry)
        for block in shared:
            if self._writers.get(block, NOBODYS) != owner:
                self._accuse("ISO-1", f"{entry.order.request_id} shares block {block} across cache salts or adapters")
        self.events["salted hit"] += entry.order.salt is not None
        self.events["adapter hit"] += entry.order.adapter > 0

    def _note_writer(self, request_id: str, tables: tuple[list[int], ...]) -> None:
        owner = _owner(self._ledger.entries[request_id])
        for block in chain.from_iterable(tables):
            self._writers[block] = owner

    def count_blocks(self) -> None:
        """Hold every block's reference count against those who own it."""
        unowned, uneven = self._engine.census()
        if uneven:
            self._uneven(uneven)
        if unowned != self._engine.num_free_blocks:
            self._accuse("KV-1", f"{unowned} blocks have no owner and {self._engine.num_free_blocks} are free")
        for request_id in self._engine.orphans():
            self._accuse("KV-2", f"blocks are owned for {request_id}, which no longer exists")

    def _uneven(self, uneven: dict[int, tuple[int, int]]) -> None:
        block, (counted, owned) = next(iter(uneven.items()))
        self._accuse("KV-1", f"block {block} has {owned} owners and counts {counted}; {len(uneven)} such blocks")
        lost = [block for block, (counted, owned) in uneven.items() if counted and not owned]
        if lost:
            self._accuse("KV-2", f"{len(lost)} blocks are held for nobody, block {lost[0]} first")

    def _at_rest(self, report: Report, paused: str) -> None:
        self.events["paused"] += bool(self._ledger.open)
        if paused == "PAUSED_ALL" and report.scheduled:
            self._accuse("PAU-1", f"{next(iter(report.scheduled))} was scheduled while all was paused")
        for name in report.admitted:
            entry = self._ledger.entries[name]
            if not entry.held and entry.order.transfer != "receive":
                self._accuse("PAU-1", f"{name} was admitted while nobody new was to be")

    def _liveliness(self, report: Report, squeezed: bool) -> None:
        if report.scheduled or report.outputs or squeezed or not self._startable():
            self._idle = 0
            return
        self._idle += 1
        if self._idle > IDLE_LIMIT:
            self._accuse("LIVE-1", f"nothing was scheduled in {IDLE_LIMIT} steps, with requests ready to run")

    def _startable(self) -> bool:
        """Whether some request waits for nothing but the scheduler: blocks that a transfer holds may be what lacks."""
        return bool(self._ledger.open) and not self._engine.transfers


def _owner(entry: Entry) -> tuple[str | None, int]:
    return entry.order.salt, entry.order.adapter
