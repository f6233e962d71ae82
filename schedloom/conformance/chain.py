"""The model that never forgives: its next token is a hash of every KV record it reads.

The state after a prefix is ``state + weight(i) * record(i)`` folded over its positions, where ``record(i)``, the KV
written at position ``i``, is ``scale * state + shift * token``. All arithmetic is modulo 2**64, every weight is odd and
``scale`` is even, so the state is multiplied by an odd number at each position: a single wrong record, wherever it
stands, never cancels out of any later state. The next token is a mix of the state.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

MASK = (1 << 64) - 1


class Chain:
    """The exact arithmetic, in plain integers: the reference against which an engine's tokens are held.

    A laboratory reads the constants and does the same in whatever form is fast for it.
    """

    start = 0x243F6A8885A308D3
    scale = 0x9E3779B97F4A7C14
    shift = 0xD1342543DE82EF95
    mixers = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
    last_shift = 31
    vocabulary = 50_000

    def __init__(self) -> None:
        self._weights: list[int] = []

    def start_of(self, salt: str | None, adapter: int) -> int:
        """The state of a sequence without tokens. Adapters change the KV that a model writes; that salts do is so only
        here, for a block shared across them to be noticed."""
        if not salt and not adapter:
            return self.start
        return self._mix((self.start ^ zlib.crc32(f"{adapter} {salt}".encode()) * self.shift) & MASK)

    def weights(self, count: int) -> list[int]:
        """The weights of the first ``count`` positions."""
        for position in range(len(self._weights), count):
            self._weights.append(self._mix((position + 1) * self.shift & MASK) | 1)
        return self._weights[:count] if len(self._weights) > count else self._weights

    def record(self, state: int, token: int) -> int:
        """The KV written for ``token`` where the state before it is ``state``."""
        return (self.scale * state + self.shift * token) & MASK

    def extend(self, state: int, position: int, tokens: Iterable[int]) -> int:
        """The state after ``tokens``, the first of which stands at ``position``."""
        for token in tokens:
            if position >= len(self._weights):
                self.weights(2 * position + 64)
            state = (state + self._weights[position] * (self.scale * state + self.shift * token)) & MASK
            position += 1
        return state

    def next_token(self, state: int) -> int:
        """A token id in 1..vocabulary. Zero is never produced: it stands for what nobody computed."""
        return 1 + self._mix(state) % self.vocabulary

    def _mix(self, value: int) -> int:
        for distance, multiplier in self.mixers:
            value = (value ^ (value >> distance)) * multiplier & MASK
        return value ^ (value >> self.last_shift)
