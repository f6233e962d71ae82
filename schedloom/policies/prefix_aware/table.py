"""Which engine has seen which prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from schedloom.core.routing import AttemptReport, Candidate, Ending, Leg

_Place = tuple[str, str, int]
_NOBODY: frozenset[_Place] = frozenset()


class PrefixTable:
    """Prefixes by engine, life and rank; at most ``capacity`` blocks, those not asked for the longest go first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[Hashable, set[_Place]] = OrderedDict()

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
        for block in reversed(blocks):
            self._seen.setdefault(block, set()).add(place)
            self._seen.move_to_end(block)
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)


def _place(candidate: Candidate) -> _Place:
    return candidate.name, candidate.contract.epoch, candidate.rank
