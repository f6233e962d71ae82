"""What ``schedloom doctor`` is told by the rooms that know."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

DOCTORS: Final = "schedloom.doctors"
"""The entry-point group of all ``Doctor`` functions. They must be importable without what they look for."""


class Health(str, Enum):
    """How a part of the environment is."""

    OK = "ok"
    WARN = "warn"
    """Something is absent or unusual that some uses need."""
    FAIL = "fail"
    """Something that is there cannot work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One part of the environment, and a sentence about it that says what to change where it is not ok."""

    health: Health
    part: str
    sentence: str


class Doctor(Protocol):
    """Looks at one room's part of the environment."""

    def __call__(self) -> Iterable[Finding]: ...
