"""What a supervisor tells a child, and what a child answers."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import SecretStr

from schedloom.router.settings import RouterSettings, WorkerSettings

SIZE_BYTES: Final = 4
"""Whatever a child is told is pickled, behind its size in so many bytes."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """``engines`` are named, ``room`` is the folder that the processes of one router share, in which each has a
    ``place`` of its own. ``is_first`` is false where it stands in for a process that has died.
    """

    settings: RouterSettings
    engines: dict[str, WorkerSettings]
    room: Path
    place: int
    log_level: int
    is_first: bool = True

    @property
    def sessions(self) -> Path:
        return sessions_in(self.room)

    @property
    def figures(self) -> Path:
        return figures_in(self.room) / str(self.place)


def sessions_in(room: Path) -> Path:
    """The table of sessions that every process has."""
    return room / "sessions"


def figures_in(room: Path) -> Path:
    """The folder in which every process keeps its figures."""
    return room / "figures"


def for_each(settings: RouterSettings, port: int) -> RouterSettings:
    """The settings of one of the processes: its share of the limits, and secrets that are the same in all."""
    share = {name: math.ceil(getattr(settings, name) / settings.processes) for name in ("max_in_flight", "max_waiting")}
    secret = settings.secret or SecretStr(secrets.token_hex(32))
    return settings.model_copy(update={**share, "secret": secret, "port": port})
