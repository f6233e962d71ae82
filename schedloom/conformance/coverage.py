"""How much of a matrix was covered: counted from the rows that ran, knowing nothing of how they were chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any


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
    """Go over every choice of axes and every choice of their values, and look for it among the rows."""
    axes = sorted(legal[0]) if legal else []
    covered = possible = 0
    for chosen in combinations(axes, strength):
        seen_legal = _seen(legal, chosen)
        seen_ran = _seen(ran, chosen)
        for values in product(*(sorted({row[axis] for row in legal}, key=repr) for axis in chosen)):
            possible += values in seen_legal
            covered += values in seen_legal and values in seen_ran
    return Coverage(strength, covered, possible)


def _seen(rows: Iterable[Mapping[str, Any]], axes: Sequence[str]) -> set[tuple[Any, ...]]:
    return {tuple(row[axis] for axis in axes) for row in rows}
