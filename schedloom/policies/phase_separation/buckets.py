"""Fitting a batch to the sizes that are compiled."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def fitting_tokens(used: int, tokens: int, buckets: Sequence[int], max_padding: float) -> int:
    """How many of ``tokens`` to add to a batch of ``used`` tokens, for ``buckets`` in ascending order.

    Never more than the last bucket holds; all of them where the bucket that this needs would not be padded by more than
    ``max_padding`` of it; otherwise what fills the bucket below. A batch is never left empty.
    """
    total = min(used + tokens, buckets[-1])
    place = bisect_left(buckets, total)
    bucket, below = buckets[place], buckets[place - 1] if place else 0
    if below > used and bucket - total > max_padding * bucket:
        total = below
    return max(0, total - used)
