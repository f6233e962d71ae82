"""Where KV travels between engines: transfers that the test, not a clock, brings to their end."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedloom.adapters.engine.laboratory.store import Arithmetic, Store

_fabrics: dict[int, Fabric] = {}
_numbers = itertools.count()

LOADING = 0xBADC0FFEE0DDF00D
"""What stands in a slot while its KV is on the way: whoever reads it computes wrong tokens."""


@dataclass(slots=True)
class Transfer:
    """KV under way. ``start`` is the first token that travels; ``sending`` is true on a Prefiller."""

    request_id: str
    blocks: list[int]
    start: int
    end: int
    sending: bool


class Fabric:
    """The far side of one engine: other engines' KV, and what of it is under way. The transfers of the requests in
    ``fast`` are over in the moment they begin: sooner than the device gets to the steps in flight."""

    def __init__(self, store: Store, arithmetic: Arithmetic, start: int) -> None:
        self.number = next(_numbers)
        _fabrics[self.number] = self
        self._store = store
        self._arithmetic = arithmetic
        self._start = np.array([start], np.uint64)
        self.prompts: dict[str, list[int]] = {}
        self.under_way: dict[str, Transfer] = {}
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.lost_blocks: set[int] = set()
        self.corrupt: list[str] = []
        self.fast: set[str] = set()
        self.begun: list[str] = []

    @staticmethod
    def numbered(number: int) -> Fabric:
        return _fabrics[number]

    def close(self) -> None:
        _fabrics.pop(self.number, None)

    def begin(self, transfer: Transfer) -> None:
        self.under_way[transfer.request_id] = transfer
        if not transfer.sending:
            self.begun.append(transfer.request_id)
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
            lost = transfer.blocks[len(transfer.blocks) // 2 :]
            self._store.slots[lost] = LOADING
            self.lost_blocks.update(lost)
        self.received.add(request_id)
        return transfer

    def take_finished(self) -> tuple[set[str], set[str]]:
        sent, received = self.sent, self.received
        self.sent, self.received = set(), set()
        return sent, received

    def take_lost_blocks(self) -> set[int]:
        lost, self.lost_blocks = self.lost_blocks, set()
        return lost

    def _exact(self, transfer: Transfer) -> Any:
        tokens = np.array(self.prompts[transfer.request_id][: transfer.end], np.uint64)
        return self._arithmetic.run(self._start, 0, tokens)[0][transfer.start :]

    def _slots(self, transfer: Transfer, value: int | None) -> None:
        place = self._place(transfer)
        self._store.slots[place] = self._exact(transfer) if value is None else np.uint64(value)

    def _compare(self, transfer: Transfer) -> None:
        if not np.array_equal(self._store.slots[self._place(transfer)], self._exact(transfer)):
            self.corrupt.append(transfer.request_id)

    def _place(self, transfer: Transfer) -> tuple[Any, Any]:
        positions = np.arange(transfer.start, transfer.end)
        first = transfer.start // self._store.block_size
        blocks = np.array(transfer.blocks)[positions // self._store.block_size - first]
        return blocks, positions % self._store.block_size
