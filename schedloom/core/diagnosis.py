"""What the commands are told by the rooms that know: of an environment, and of a configuration file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from schedloom.core.policy import Policy

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


FORECASTS: Final = "schedloom.forecasts"
"""The entry-point group of the ``Forecast`` functions, each named after its side. They must be importable without an
engine."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """What a start would complain of though every key fits, and what only the start can know; one sentence each."""

    complaints: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Forecast(Protocol):
    """Looks at a configuration file as a start would.

    ``values`` is the whole file, ``section`` our part of it, ``policies`` those that it switches on.
    """

    def __call__(self, values: Mapping[str, Any], section: Any, policies: Sequence[Policy]) -> Prospect: ...
