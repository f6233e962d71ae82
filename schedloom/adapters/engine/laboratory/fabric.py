"""Where KV travels between engines: transfers that the test, not a clock, brings to their end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedloom.adapters.engine.laboratory.store import Arithmetic, Numbers, Store, Words

_fabrics: dict[int, Fabric] = {}
_numbers = itertools.count()

LOADING = 0xBADC0FFEE0DDF00D
"""What stands in a slot while its KV is on the way: whoever reads it computes wrong tokens."""


@dataclass(slots=True)
class Transfer:
    """KV under way: of tokens ``start`` to ``end``. ``blocks`` holds the request's table of each KV cache group, with 0
    where the group needs no block; ``sending`` is true on a Prefiller."""

    request_id: str
    blocks: tuple[list[int], ...]
    start: int
    end: int
    sending: bool


class Fabric:
    """The far side of one engine: other engines' KV, and what of it is under way.

    The transfers of the requests in ``fast`` are over in the moment they begin: sooner than the device gets to the
    steps in flight. ``withheld`` tokens at the end of a prompt are not sent: a request without any left would compute
    its last one again, and look for KV that its window has left behind.
    """

    def __init__(self, store: Store, arithmetic: Arithmetic, cell: Any) -> None:
        self.number = next(_numbers)
        _fabrics[self.number] = self
        self._store = store
        self._arithmetic = arithmetic
        self._groups = cell.groups
        self._fail_requests = cell.slides and not cell.failed_blocks
        self.withheld = int(cell.slides and not cell.whole_loads)
        self.prompts: dict[str, list[int]] = {}
        self.starts: dict[str, int] = {}
        self.under_way: dict[str, Transfer] = {}
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.lost_blocks: set[int] = set()
        self.corrupt: list[str] = []
        self.fast: set[str] = set()

    @staticmethod
    def numbered(number: int) -> Fabric:
        return _fabrics[number]

    def close(self) -> None:
        _fabrics.pop(self.number, None)

    def begin(self, transfer: Transfer) -> None:
        self.under_way[transfer.request_id] = transfer
        if not transfer.sending:
            self._slots(transfer, LOADING)
        if transfer.request_id in self.fast:
            self.settle(transfer.request_id)

    def settle(self, request_id: str, failed: bool = False) -> Transfer | None:
        """Bring a transfer to its end. A failed one leaves part of its blocks unwritten."""
        transfer = self.under_way.pop(request_id, None)
        if transfer is None:
            return None
        if transfer.sending:
            self._compare(transfer)
            self.sent.add(request_id)
            return transfer
        self._slots(transfer, None)
        if failed:
            self._fail(transfer)
        self.received.add(request_id)
        return transfer

    def blocks_of(self, transfer: Transfer) -> list[int]:
        """Those between which KV travels, in the order of tokens; of all KV cache groups."""
        pairs = zip(transfer.blocks, self._groups, strict=True)
        spans = [
            table[transfer.start // group.block_size : -(-transfer.end // group.block_size)] for table, group in pairs
        ]
        return [block for span in spans for block in span if block]

    def take_finished(self) -> tuple[set[str], set[str], set[str]]:
        """What was sent, what was received, and what of it failed."""
        taken = self.sent, self.received, self.failed
        self.sent, self.received, self.failed = set(), set(), set()
        return taken

    def take_lost_blocks(self) -> set[int]:
        lost, self.lost_blocks = self.lost_blocks, set()
        return lost

    def _fail(self, transfer: Transfer) -> None:
        blocks = self.blocks_of(transfer)
        if self._fail_requests:
            self._store.slots[blocks] = LOADING
            self.failed.add(transfer.request_id)
            return
        lost = blocks[len(blocks) // 2 :]
        self._store.slots[lost] = LOADING
        self.lost_blocks.update(lost)

    def _slots(self, transfer: Transfer, value: int | None) -> None:
        for blocks, offsets, exact in self._places(transfer):
            self._store.slots[blocks, offsets] = exact if value is None else np.uint64(value)

    def _compare(self, transfer: Transfer) -> None:
        for blocks, offsets, exact in self._places(transfer):
            if not np.array_equal(self._store.slots[blocks, offsets], exact):
                self.corrupt.append(transfer.request_id)

    def _places(self, transfer: Transfer) -> Iterator[tuple[Numbers, Numbers, Words]]:
        """Of each group, where its KV stands and what belongs there."""
        tokens = np.array(self.prompts[transfer.request_id][: transfer.end], np.uint64)
        start = np.array([self.starts.get(transfer.request_id, self._arithmetic.start[0])], np.uint64)
        records, after = self._arithmetic.run(start, 0, tokens)
        positions = np.arange(transfer.start, transfer.end)
        for table, group in zip(transfer.blocks, self._groups, strict=True):
            blocks = np.array(table)[positions // group.block_size]
            needed = positions[blocks != 0]
            exact = records if group.window is None else after
            yield blocks[blocks != 0], needed % group.block_size, exact[needed]
