"""From a long script that breaks an invariant to a short one that breaks the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from schedloom.conformance.script import Act, Step

BreaksIt = Callable[[Sequence[Act]], bool]


def shrink(acts: Sequence[Act], breaks_it: BreaksIt, tries: int = 400) -> list[Act]:
    """Leave out runs of acts, longest first, as long as the rest still breaks it; then shorten what is stepped.

    At most ``tries`` scripts are tried.
    """
    left = tries

    def still(candidate: Sequence[Act]) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and breaks_it(candidate)

    kept = list(acts)
    length = max(len(kept) // 2, 1)
    while length and left > 0:
        place = 0
        while place < len(kept) and left > 0:
            candidate = kept[:place] + kept[place + length :]
            if candidate and still(candidate):
                kept = candidate
            else:
                place += length
        length //= 2
    return _fewer_steps(kept, still)


def _fewer_steps(acts: list[Act], still: BreaksIt) -> list[Act]:
    for place, act in enumerate(acts):
        if isinstance(act, Step) and act.count > 1:
            candidate = [*acts[:place], Step(1), *acts[place + 1 :]]
            if still(candidate):
                acts = candidate
    return acts
