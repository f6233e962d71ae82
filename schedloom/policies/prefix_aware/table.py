"""Which engine has seen which prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Final

from schedloom.core.routing import AttemptReport, Candidate, Ending, Leg

MOST_PLACES: Final = 1024
"""Lives of engines, by rank, that a block remembers at most: engines come and go, a block that all ask for stays."""

_Place = tuple[str, str, int]
_NOBODY: frozenset[_Place] = frozenset()


class PrefixTable:
    """Prefixes by engine, life and rank; at most ``capacity`` blocks, those not asked for the longest go first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[Hashable, set[_Place]] = OrderedDict()
        self._lately: OrderedDict[_Place, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def matches(self, blocks: Sequence[Hashable], candidates: Sequence[Candidate]) -> list[int]:
        """How many of ``blocks``, from the first on, each of ``candidates`` has seen."""
        matches = [len(blocks)] * len(candidates)
        follow = {_place(candidate): number for number, candidate in enumerate(candidates)}
        for depth, block in enumerate(blocks):
            for place in follow.keys() - self._seen.get(block, _NOBODY):
                matches[follow.pop(place)] = depth
            if not follow:
                break
            self._seen.move_to_end(block)
        return matches

    def learn(self, blocks: Sequence[Hashable], report: AttemptReport) -> None:
        """An engine that answered has seen the prompt; one that turned a local attempt away may not."""
        if report.ending is not Ending.ANSWERED or (report.leg is Leg.APPEND and not report.output_tokens):
            return
        place = _place(report.candidate)
        self._answered(place)
        for block in reversed(blocks):
            seen = self._seen.setdefault(block, set())
            seen.add(place)
            if len(seen) > MOST_PLACES:
                seen.intersection_update(self._lately)
            self._seen.move_to_end(block)
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)

    def _answered(self, place: _Place) -> None:
        self._lately[place] = None
        self._lately.move_to_end(place)
        if len(self._lately) > MOST_PLACES:
            self._lately.popitem(last=False)


def _place(candidate: Candidate) -> _Place:
    return candidate.name, candidate.contract.epoch, candidate.rank
