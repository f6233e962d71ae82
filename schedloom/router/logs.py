"""What the log says, and which of several processes says it."""

from __future__ import annotations

import logging
from typing import Final

common: Final = logging.getLogger("schedloom.router.engines")
"""For what all processes of a router see alike."""

whole: Final = logging.getLogger("schedloom.router.whole")
"""For what becomes of the router: its only process tells it, or the one that keeps the others."""


def counted(count: int, what: str) -> str:
    """So many of ``what``, whose plural ends in an s."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def configure_logging(level: str = "INFO", place: int | None = None) -> None:
    """``place`` is that of one of several processes. Its lines tell its id, and what all see alike is told by the first
    alone, unless everything is to be logged. What becomes of the router none of them tells.
    """
    process = "" if place is None else "[%(process)d] "
    logging.basicConfig(level=level, format=f"%(asctime)s %(levelname)s {process}%(name)s: %(message)s")
    common.disabled = bool(place) and level != "DEBUG"
    whole.disabled = place is not None
