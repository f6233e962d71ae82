"""What the suite says about a subject."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(str, Enum):
    """``inconclusive``: nothing went wrong, but what was to be tried never happened. That is not a pass.

    ``refused``: the combination was turned down at composition, with a reason.
    """

    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Violation:
    """``invariant`` was broken in step ``step``."""

    invariant: str
    message: str
    step: int
