"""How much work one request may cause before its output, and whom it is rather not given to again."""

from __future__ import annotations

import logging
from typing import Final

from schedloom.router.dispatch import Interrupted, Unreached
from schedloom.router.failures import Failure
from schedloom.router.fleet.fleet import Doubt, Doubts, Fleet
from schedloom.router.fleet.worker import Worker

MOST_DISPATCHES: Final = 5
"""A local attempt, a Prefiller and a Decoder, and two for what of them fails."""

A_PASS: Final = 2
"""Dispatches of one pass through a Prefiller and a Decoder."""


class Effort:
    """What has been done for one request; ``left`` is how many dispatches more it may cause, ``loudness`` the level at
    which it was logged that an attempt failed, if one did.
    """

    __slots__ = ("_asked", "_prefiller", "doubts", "left", "loudness", "was_late")

    def __init__(self, left: int = MOST_DISPATCHES, doubts: Doubts | None = None) -> None:
        self.left = left
        self.doubts: dict[Worker, Doubt] = {} if doubts is None else dict(doubts)
        self.was_late = False
        self.loudness: int | None = None
        self._asked: Worker | None = None
        self._prefiller: Worker | None = None

    def asks(self, worker: Worker, *, prefills: bool = False) -> None:
        self.left -= 1
        self._asked = worker
        if prefills:
            self._prefiller = worker

    def needs(self, worker: Worker) -> bool:
        """Whether ``worker`` was asked last, or keeps the KV that a Decoder is to take."""
        return worker is self._asked or worker is self._prefiller

    def failed(self, failure: Failure) -> None:
        """A Decoder that took a hand-over up may have failed for what its Prefiller gave it; one that did not has a
        Prefiller that is well.
        """
        self.loudness = logging.WARNING if isinstance(failure, Unreached | Interrupted) else logging.DEBUG
        culprit, prefiller = failure.culprit, self._prefiller
        if culprit is None:
            return
        self.doubts = {one: doubt or Doubt.PROVED for one, doubt in self.doubts.items()}
        self.doubts[culprit] = Doubt.FAILED
        if prefiller is not None:
            was_taken_up = not isinstance(failure, Unreached) and failure.status not in (429, 503)
            self.doubts.setdefault(prefiller, Doubt.DOUBTED if was_taken_up else Doubt.PROVED)

    def turned_away(self, worker: Worker) -> None:
        self.doubts[worker] = Doubt.NONE

    def came_late(self) -> None:
        """The Decoder that was asked last could not be reached in time."""
        self.loudness = logging.WARNING
        self.was_late = True
        if self._asked is not None:
            self.doubts.setdefault(self._asked, Doubt.DOUBTED)

    def may_help(self, fleet: Fleet, *, prefills: bool) -> bool:
        """Whether others than those that failed are there."""
        failed = [worker for worker, doubt in self.doubts.items() if doubt is Doubt.FAILED]
        if not prefills:
            return fleet.has_other_decoders(failed)
        is_doubted = Doubt.DOUBTED in self.doubts.values()
        others = fleet.has_other_decoders(failed) or (is_doubted and fleet.has_other_prefillers(self.doubts))
        return others and fleet.has_other_prefillers(failed)
