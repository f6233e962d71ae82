"""A few rows out of many in which every combination of a few axes' values still occurs."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import combinations

Row = Sequence[Hashable]
Interaction = tuple[tuple[int, Hashable], ...]

CANDIDATES = 40
"""Rows looked at for each row that is taken: the best of them is."""


def interactions(row: Row, strength: int) -> Iterator[Interaction]:
    """Every combination of ``strength`` axes with the values that they have in ``row``."""
    return combinations(tuple(enumerate(row)), strength)


def cover(rows: Sequence[Row], strength: int, seed: int = 0) -> list[int]:
    """Places of rows that together hold every interaction of ``strength`` axes that any row holds.

    Greedy: each time an open interaction is picked, and of some rows that hold it the one that closes most.
    """
    rng = random.Random(seed)
    holders: dict[Interaction, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        for interaction in interactions(row, strength):
            holders[interaction].append(place)
    open_interactions = dict.fromkeys(sorted(holders, key=lambda key: (len(holders[key]), repr(key))))
    taken: list[int] = []
    while open_interactions:
        hardest = next(iter(open_interactions))
        candidates = holders[hardest]
        if len(candidates) > CANDIDATES:
            candidates = rng.sample(candidates, CANDIDATES)
        best = max(candidates, key=lambda place: _gain(rows[place], strength, open_interactions))
        taken.append(best)
        for interaction in interactions(rows[best], strength):
            open_interactions.pop(interaction, None)
    return taken


def _gain(row: Row, strength: int, open_interactions: dict[Interaction, None]) -> int:
    return sum(interaction in open_interactions for interaction in interactions(row, strength))
