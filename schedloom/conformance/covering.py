"""A few rows out of many in which every combination of a few axes' values still occurs."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from functools import reduce
from itertools import combinations
from operator import and_

Row = Sequence[Hashable]
Interaction = tuple[tuple[int, Hashable], ...]

CANDIDATES = 40
"""Rows looked at for each row that is taken: the best of them is."""


def interactions(row: Row, strength: int) -> Iterator[Interaction]:
    """Every combination of ``strength`` axes with the values that they have in ``row``."""
    return combinations(tuple(enumerate(row)), strength)


def cover(rows: Sequence[Row], strength: int, seed: int = 0) -> list[int]:
    """Places of rows that together hold every interaction of ``strength`` axes that any row holds.

    Greedy: each time the open interaction that fewest rows hold is taken up, and of some rows that hold it the one
    that closes most.
    """
    rng = random.Random(seed)
    axes = [_by_value(column) for column in zip(*rows, strict=True)]
    holders = _count_holders(axes, len(rows), strength)
    open_interactions = dict.fromkeys(sorted(holders, key=lambda key: (holders[key], repr(key))))
    taken: list[int] = []
    while open_interactions:
        hardest = reduce(and_, (axes[axis][value] for axis, value in next(iter(open_interactions))))
        candidates = sorted({_some_place(hardest, rng) for _ in range(CANDIDATES)})
        best = max(candidates, key=lambda place: _gain(rows[place], strength, open_interactions))
        taken.append(best)
        for interaction in interactions(rows[best], strength):
            open_interactions.pop(interaction, None)
    return taken


def _count_holders(axes: Sequence[dict[Hashable, int]], num_rows: int, strength: int) -> dict[Interaction, int]:
    """How many rows hold each interaction that occurs. Rows are the bits of numbers."""
    counts: dict[Interaction, int] = {}

    def descend(axis: int, interaction: Interaction, places: int) -> None:
        if len(interaction) == strength:
            counts[interaction] = places.bit_count()
            return
        for later in range(axis, len(axes)):
            for value, here in axes[later].items():
                if both := places & here:
                    descend(later + 1, (*interaction, (later, value)), both)

    descend(0, (), (1 << num_rows) - 1)
    return counts


def _by_value(column: Sequence[Hashable]) -> dict[Hashable, int]:
    digits = {value: bytearray(len(column) // 8 + 1) for value in column}
    for place, value in enumerate(column):
        digits[value][place >> 3] |= 1 << (place & 7)
    return {value: int.from_bytes(bits, "little") for value, bits in digits.items()}


def _some_place(places: int, rng: random.Random) -> int:
    """The first of ``places`` at or after a random one, or the first of all."""
    start = rng.randrange(places.bit_length())
    later = places >> start
    return start + (later & -later).bit_length() - 1


def _gain(row: Row, strength: int, open_interactions: dict[Interaction, None]) -> int:
    return sum(interaction in open_interactions for interaction in interactions(row, strength))
