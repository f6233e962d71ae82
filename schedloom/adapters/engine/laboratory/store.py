"""Physical KV: one 64-bit record for each slot, and the model's arithmetic on arrays of records."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


class Arithmetic:
    """A chain's arithmetic on arrays, for sequences of at most ``limit`` tokens.

    The fold over a run of tokens is linear in the state, so it is a cumulative sum once each term is divided by the
    product of the multipliers up to its position; they are odd, hence have inverses modulo 2**64.
    """

    def __init__(self, chain: Any, limit: int) -> None:
        weights = list(chain.weights(limit))
        products, inverses, terms = [1], [1], []
        for weight in weights[:limit]:
            products.append(products[-1] * (1 + chain.scale * weight) % 2**64)
            inverses.append(pow(products[-1], -1, 2**64))
            terms.append(inverses[-1] * weight * chain.shift % 2**64)
        self.weights: Words = np.array(weights[:limit], np.uint64)
        self.positions: Numbers = np.arange(limit)
        self._products: Words = np.array(products, np.uint64)
        self._inverses: Words = np.array(inverses, np.uint64)
        self._terms: Words = np.array(terms, np.uint64)
        self.start, self._scale, self._shift = (
            np.array([value], np.uint64) for value in (chain.start, chain.scale, chain.shift)
        )
        self._mixers = [(np.uint64(distance), np.uint64(factor)) for distance, factor in chain.mixers]
        self._last_shift = np.uint64(chain.last_shift)
        self._vocabulary = np.uint64(chain.vocabulary)

    def records(self, states: Words, tokens: Words) -> Words:
        """The KV of each token, given the state before it."""
        records: Words = self._scale * states + self._shift * tokens
        return records

    def after(self, states: Words, positions: Numbers, tokens: Words) -> Words:
        """The state after each token, given the state before it."""
        following: Words = states + self.weights[positions] * self.records(states, tokens)
        return following

    def run(self, state: Words, position: int, tokens: Words) -> tuple[Words, Words]:
        """The records of a run of ``tokens`` that starts at ``position``, and the state after each of them."""
        end = position + len(tokens)
        sums = np.cumsum(self._terms[position:end] * tokens) + self._inverses[position] * state
        after = self._products[position + 1 : end + 1] * sums
        before = np.concatenate((state, after[:-1]))
        return self.records(before, tokens), after

    def fold(self, records: Words, lengths: Numbers, starts: Words | None = None) -> Words:
        """The states that come of reading ``lengths[i]`` records of row ``i`` of ``records``, from ``starts[i]`` on."""
        width = records.shape[1]
        read = self.positions[:width] < lengths[:, None]
        weighted = records * (self.weights[:width] * read)
        states: Words = weighted.sum(axis=1, dtype=np.uint64) + (self.start if starts is None else starts)
        return states

    def next_tokens(self, states: Words) -> Words:
        mixed = states
        for distance, factor in self._mixers:
            mixed = (mixed ^ (mixed >> distance)) * factor
        tokens: Words = (mixed ^ (mixed >> self._last_shift)) % self._vocabulary + np.uint64(1)
        return tokens


class Store:
    """The KV cache of one engine: ``num_blocks`` blocks of ``num_slots`` slots, full of garbage at first.

    All KV cache groups share the blocks, each in blocks of its own size, so a block may have more slots than it uses.
    """

    def __init__(self, num_blocks: int, num_slots: int, seed: int) -> None:
        garbage = np.random.default_rng(seed)
        self.slots: Words = garbage.integers(0, 2**64, (num_blocks, num_slots), dtype=np.uint64)

    def zero(self, blocks: list[int]) -> None:
        self.slots[blocks] = 0

    def copy(self, copies: list[tuple[int, int]]) -> None:
        source, target = zip(*copies, strict=True)
        self.slots[list(target)] = self.slots[list(source)]
