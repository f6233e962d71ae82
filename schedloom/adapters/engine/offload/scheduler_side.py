"""The connector in the scheduler: which preempted request's KV is where, and who holds what for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from schedloom.adapters.engine.offload.metadata import BlockCopies, Job, OffloadMetadata, SaveReport
from schedloom.adapters.engine.offload.slots import HostSlots
from schedloom.adapters.engine.offload.stats import OffloadCounters

Observer = Callable[[str, str, int], None]
"""Told a request's id, what happened to its KV (``saved``, ``loading``, or how it ended), and of how many tokens."""


class Phase(Enum):
    SAVING = 1
    SAVED = 2
    LOADING = 3


@dataclass(slots=True)
class SavedRequest:
    """``slots``: for each cache group and each of its blocks a host slot, or None where the group needs no block.

    ``pins``: the blocks that are being copied, each with a reference of ours; ``missing_reports``: the workers that
    have not yet copied theirs; ``ended``: the request ended while it was being loaded.
    """

    request_id: str
    number: int
    num_tokens: int
    slots: list[list[int | None]]
    pins: list[Any]
    missing_reports: int
    deadline: float = 0.0
    phase: Phase = Phase.SAVING
    ended: bool = False

    def all_slots(self) -> Iterator[int]:
        return (slot for group in self.slots for slot in group if slot is not None)


class OffloadScheduler:
    """Saves and restores. A request is restored from the very blocks it had, so that it goes on exactly.

    Until the workers report a save, its blocks keep a reference of ours: they are neither zeroed nor written by
    anybody, in whatever order a model runner zeroes, copies and computes.
    """

    def __init__(
        self,
        block_sizes: list[int],
        slots: HostSlots,
        slot_bytes: int,
        num_workers: int,
        timeout_seconds: float,
        obstacle: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots = slots
        self.counters = OffloadCounters()
        self._block_sizes = block_sizes
        self._slot_bytes = slot_bytes
        self._num_workers = num_workers
        self._timeout_seconds = timeout_seconds
        self.obstacle = obstacle
        self._clock = clock
        self.observer: Observer = lambda request_id, event, num_tokens: None
        self._pool: Any = None
        self._number = 0
        self._requests: dict[str, SavedRequest] = {}
        self._saving: dict[int, SavedRequest] = {}
        self._saves: dict[int, Job] = {}
        self._loads: list[Job] = []

    def bind(self, pool: Any) -> None:
        self._pool = pool

    # While vLLM schedules

    def take(self, request: Any, block_ids: tuple[list[int], ...], num_tokens: int) -> bool:
        """Save the first ``num_tokens`` tokens of ``request``, which is about to lose its blocks; False: impossible."""
        self._drop(request.request_id, "superseded")
        refusal = self._refusal(request, num_tokens) or self._save(request, block_ids, num_tokens)
        if refusal:
            self.counters.count(f"refused_{refusal}")
        return not refusal

    def holds(self, request_id: str) -> bool:
        return request_id in self._requests

    def restorable(self, request: Any, num_local_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the local ones; None while they are still being saved. Changes nothing."""
        saved = self._requests.get(request.request_id)
        if saved is None or saved.phase is Phase.LOADING:
            return 0, False
        if saved.phase is Phase.SAVING:
            return None, False
        count = saved.num_tokens - num_local_tokens
        # A request that had no token left to compute would compute one again, outside the window that was saved.
        return (count, True) if count > 0 and saved.num_tokens < request.num_tokens else (0, False)

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM has given ``request`` blocks: load into those that it has for itself."""
        saved = self._requests.get(request.request_id)
        if saved is None or saved.phase is Phase.LOADING:
            return
        if num_external_tokens <= 0:
            self._drop(saved.request_id, "superseded")
            return
        saved.phase = Phase.LOADING
        self.observer(saved.request_id, "loading", num_external_tokens)
        copies = [
            self._to_load(group, *pair) for group, pair in enumerate(zip(blocks.blocks, saved.slots, strict=True))
        ]
        self._loads.append(Job(self._next_number(), saved.request_id, copies))
        self.counters.count("restored_bytes", self._bytes(sum(len(group.blocks) for group in copies)))

    def has_pins(self) -> bool:
        return bool(self._saving)

    def orders(self) -> OffloadMetadata:
        """What the workers are to begin in this step."""
        if self._saving:
            self._give_up_late_saves()
        saves, self._saves = list(self._saves.values()), {}
        loads, self._loads = self._loads, []
        return OffloadMetadata(saves, loads)

    # When something has happened

    def reported(self, report: SaveReport) -> None:
        for number in report.failed:
            if saved := self._saving.get(number):
                self._drop(saved.request_id, "fallback_save_failed")
        for number, count in report.done.items():
            if saved := self._saving.get(number):
                saved.missing_reports -= count
                if saved.missing_reports <= 0:
                    self._complete_save(saved)

    def loaded(self, request_id: str, failed: bool) -> None:
        saved = self._requests.get(request_id)
        if saved is not None and saved.phase is Phase.LOADING:
            self._drop(request_id, "dropped" if saved.ended else "fallback_load_failed" if failed else "restores")

    def finished(self, request_id: str) -> None:
        """The request has ended. While it is being loaded it keeps its slots until that is over."""
        saved = self._requests.get(request_id)
        if saved is None:
            return
        saved.ended = True
        if saved.phase is not Phase.LOADING:
            self._drop(request_id, "dropped")

    def discard(self) -> bool:
        """Forget everything that is saved or being saved. False when a load is under way, which nobody can stop."""
        for saved in list(self._requests.values()):
            if saved.phase is not Phase.LOADING:
                self._drop(saved.request_id, "fallback_discarded")
        return not self._requests

    def _refusal(self, request: Any, num_tokens: int) -> str | None:
        if self.obstacle:
            return self.obstacle
        if num_tokens <= 0:
            return "no_tokens"
        return "no_reading" if request.skip_reading_prefix_cache else None

    def _save(self, request: Any, block_ids: tuple[list[int], ...], num_tokens: int) -> str | None:
        rows = [ids[: -(-num_tokens // size)] for ids, size in zip(block_ids, self._block_sizes, strict=True)]
        blocks = [[self._pool.blocks[number] for number in row] for row in rows]
        pins = [block for row in blocks for block in row if not block.is_null]
        slots = self.slots.take(len(pins))
        if slots is None:
            return "no_capacity"
        self._pool.touch(pins)
        supply = iter(slots)
        by_block = [[None if block.is_null else next(supply) for block in row] for row in blocks]
        copies = [_to_save(group, *pair) for group, pair in enumerate(zip(blocks, by_block, strict=True))]
        job = Job(self._next_number(), request.request_id, copies)
        self._saves[job.number] = job
        self._remember(SavedRequest(job.request_id, job.number, num_tokens, by_block, pins, self._num_workers))
        return None

    def _remember(self, saved: SavedRequest) -> None:
        saved.deadline = self._clock() + self._timeout_seconds
        self._requests[saved.request_id] = self._saving[saved.number] = saved

    def _complete_save(self, saved: SavedRequest) -> None:
        self._unpin(saved)
        saved.phase = Phase.SAVED
        self.observer(saved.request_id, "saved", saved.num_tokens)
        self.counters.count("saves")
        self.counters.count("saved_bytes", self._bytes(sum(1 for _ in saved.all_slots())))

    def _give_up_late_saves(self) -> None:
        now = self._clock()
        for saved in [saved for saved in self._saving.values() if saved.deadline < now]:
            self._drop(saved.request_id, "fallback_save_timed_out")

    def _drop(self, request_id: str, event: str) -> None:
        """Give back everything held for a request. A worker may still be copying: see ``OffloadWorker``."""
        saved = self._requests.pop(request_id, None)
        if saved is None:
            return
        if saved.phase is Phase.SAVING:
            self._unpin(saved)
            self._saves.pop(saved.number, None)
        self.slots.give_back(saved.all_slots())
        self.counters.count(event)
        self.observer(request_id, event, saved.num_tokens)

    def _unpin(self, saved: SavedRequest) -> None:
        """As vLLM frees a request's blocks: its tail is the first to be used again."""
        del self._saving[saved.number]
        self._pool.free_blocks(reversed(saved.pins))
        saved.pins = []

    def _to_load(self, group: int, blocks: Any, slots: list[int | None]) -> BlockCopies:
        """Blocks of the prefix cache are shared and stay as they are; those outside a sliding window do not exist."""
        pairs = [
            (block.block_id, slot)
            for block, slot in zip(blocks, slots, strict=False)
            if self._pool.is_block_writable(block)
        ]
        if any(slot is None for _, slot in pairs):
            raise RuntimeError(f"cache group {group} needs a block that was not saved")
        return BlockCopies(group, [block for block, _ in pairs], [slot for _, slot in pairs if slot is not None])

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _bytes(self, num_blocks: int) -> int:
        return num_blocks * self._slot_bytes * self._num_workers


def _to_save(group: int, blocks: list[Any], slots: list[int | None]) -> BlockCopies:
    pairs = [(block.block_id, slot) for block, slot in zip(blocks, slots, strict=True) if slot is not None]
    return BlockCopies(group, [block for block, _ in pairs], [slot for _, slot in pairs])
