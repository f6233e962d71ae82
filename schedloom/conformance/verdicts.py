"""What the suite says about a subject."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


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


def raised(error: BaseException) -> str:
    """What ``error`` says, and where it came from."""
    said = f"{type(error).__name__}: {error}"[:300]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{said} ({Path(frames[-1].filename).name}:{frames[-1].lineno}, in {frames[-1].name})" if frames else said
