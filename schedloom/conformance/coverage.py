"""How much of a matrix was covered: counted from the rows that ran, knowing nothing of how they were chosen."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

CHUNK = 8192
"""Rows looked at before asking whether a choice of axes has anything left to show."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """``legal`` interactions of ``strength`` axes occur in some legal row; ``covered`` of them in one that ran."""

    strength: int
    covered: int
    legal: int

    @property
    def complete(self) -> bool:
        return self.covered == self.legal


def count(ran: Sequence[Mapping[str, Any]], legal: Sequence[Mapping[str, Any]], strength: int) -> Coverage:
    """Go over every choice of axes, and over every combination of values that some row has of them."""
    axes = sorted(legal[0]) if legal else []
    # In the order of the product the rare values come last; in any other order most choices are through in a chunk.
    shuffled = random.Random(0).sample(legal, len(legal))
    columns = {axis: [row[axis] for row in shuffled] for axis in axes}
    values = {axis: len(set(column)) for axis, column in columns.items()}
    covered = possible = 0
    for chosen in combinations(axes, strength):
        seen = _seen([columns[axis] for axis in chosen], prod(values[axis] for axis in chosen))
        possible += len(seen)
        covered += len(seen & {tuple(row[axis] for axis in chosen) for row in ran})
    return Coverage(strength, covered, possible)


def _seen(columns: Sequence[Sequence[Any]], most: int) -> set[tuple[Any, ...]]:
    """The combinations of values in ``columns``, of which there are ``most`` at the most."""
    seen: set[tuple[Any, ...]] = set()
    for start in range(0, len(columns[0]), CHUNK):
        seen.update(zip(*(column[start : start + CHUNK] for column in columns), strict=True))
        if len(seen) == most:
            break
    return seen
