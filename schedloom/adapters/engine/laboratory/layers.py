"""What a model's layers keep in the blocks of their KV cache group, and what they see of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from schedloom.adapters.engine.laboratory.store import Arithmetic, Numbers, Store, Words

DAMAGE = np.uint64(0x9E6D62D06F6A9A9B)
"""An odd factor: damage that a layer sees never cancels out of the state that it is added to."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of each row of the batch: its tokens, and the state that it starts from."""

    tokens: Words
    starts: Words


class Layers:
    """The layers of one KV cache group: block tables, one row for each sequence in the batch."""

    def __init__(self, store: Store, arithmetic: Arithmetic, block_size: int, num_rows: int) -> None:
        self.block_size = block_size
        self.tables: Numbers = np.zeros((num_rows, -(-len(arithmetic.weights) // block_size)), np.int64)
        self._store = store
        self._arithmetic = arithmetic

    def write(self, rows: Numbers | int, positions: Numbers, records: Words, after: Words) -> None:
        """Write one slot for each position, of as many rows or of one: ``records``, and the states ``after`` them, are
        what is known of it."""
        raise NotImplementedError

    def read(self, rows: Numbers, lengths: Numbers, known: Known, next_token: bool) -> Words:
        """The states behind the first ``lengths[i]`` tokens of ``rows[i]``, as far as the next token's query sees them;
        without ``next_token`` as the last one's does."""
        raise NotImplementedError

    def overwrite(self, row: int, positions: Numbers, value: int) -> None:
        block, offset = np.divmod(positions, self.block_size)
        self._store.slots[self.tables[row, block], offset] = np.uint64(value)

    def _put(self, rows: Numbers | int, positions: Numbers, values: Words) -> None:
        block, offset = np.divmod(positions, self.block_size)
        self._store.slots[self.tables[rows, block], offset] = values


class FullAttention(Layers):
    """Keeps the records, and reads all of them."""

    def write(self, rows: Numbers | int, positions: Numbers, records: Words, after: Words) -> None:
        self._put(rows, positions, records)

    def read(self, rows: Numbers, lengths: Numbers, known: Known, next_token: bool) -> Words:
        width = -(-int(lengths.max()) // self.block_size)
        slots = self._store.slots[:, : self.block_size]
        records = slots[self.tables[rows, :width]].reshape(len(rows), -1)
        if width * self.block_size > len(self._arithmetic.weights):
            records = records[:, : len(self._arithmetic.weights)]
        return self._arithmetic.fold(records, lengths, known.starts[rows])


class SlidingWindow(Layers):
    """Keeps the state behind each token, which tells of the whole prefix, and reads the last few: they must follow from
    one another by the tokens between them."""

    def __init__(self, store: Store, arithmetic: Arithmetic, block_size: int, num_rows: int, window: int) -> None:
        super().__init__(store, arithmetic, block_size, num_rows)
        self._window = window

    def write(self, rows: Numbers | int, positions: Numbers, records: Words, after: Words) -> None:
        self._put(rows, positions, after)

    def read(self, rows: Numbers, lengths: Numbers, known: Known, next_token: bool) -> Words:
        span = self._window - next_token
        positions = lengths[:, None] - np.arange(span, 0, -1)
        inside, safe = positions >= 0, np.maximum(positions, 0)
        block, offset = np.divmod(safe, self.block_size)
        states = self._store.slots[self.tables[rows[:, None], block], offset]
        states = np.where(inside, states, known.starts[rows][:, None])
        follows = self._arithmetic.after(states[:, :-1], safe[:, 1:], known.tokens[rows[:, None], safe[:, 1:]])
        wrong = np.where(inside[:, 1:], states[:, 1:] ^ follows, np.uint64(0))
        read: Words = states[:, -1] + DAMAGE * wrong.sum(axis=1, dtype=np.uint64)
        return read


def build_layers(groups: Any, store: Store, arithmetic: Arithmetic, num_rows: int) -> list[Layers]:
    """The layers of each of a cell's KV cache ``groups``."""
    return [
        FullAttention(store, arithmetic, group.block_size, num_rows)
        if group.window is None
        else SlidingWindow(store, arithmetic, group.block_size, num_rows, group.window)
        for group in groups
    ]


def read_all(layers: list[Layers], rows: Numbers, lengths: Numbers, known: Known, next_token: bool) -> Words:
    """What all groups read must be the same; the state is wrong for good where it is not."""
    states = layers[0].read(rows, lengths, known, next_token)
    for other in layers[1:]:
        states = states + DAMAGE * (states ^ other.read(rows, lengths, known, next_token))
    return states
