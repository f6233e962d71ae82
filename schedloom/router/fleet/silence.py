"""Engines that hang: they took requests, and nothing comes from them any more, not even how they are."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

from schedloom.router.fleet.worker import Worker
from schedloom.router.http.upstream import Upstream
from schedloom.router.logs import counted

log = logging.getLogger(__name__)

LEAST_LOOKS: Final = 3
"""A server that is busy, or a router that was, misses one or two."""


@dataclass(slots=True)
class _Silence:
    """Of one engine; ``looks`` at it were not answered."""

    since: float
    looks: int = 0


class Silences:
    """Gives up what waits at an engine that has been silent for ``seconds``, so that others may serve it."""

    def __init__(self, upstream: Upstream, seconds: float) -> None:
        self._upstream = upstream
        self._seconds = seconds
        self._silences: WeakKeyDictionary[Worker, _Silence] = WeakKeyDictionary()

    def end(self, worker: Worker) -> None:
        """It said something, if only that nobody listens there."""
        self._silences.pop(worker, None)

    def go_on(self, worker: Worker, since: float) -> None:
        """It did not answer a look that began at ``since``."""
        silence = self._silences.setdefault(worker, _Silence(since))
        silence.looks += 1
        silence.since = max(silence.since, self._upstream.heard_at(worker.origin))
        seconds = asyncio.get_running_loop().time() - silence.since
        if silence.looks < LEAST_LOOKS or seconds < self._seconds:
            return
        if given_up := self._upstream.give_up(worker.origin):
            log.warning(
                "%s hangs, nothing came from it for %.0f s: given up there, without output yet: %s",
                *(worker.name, seconds, counted(given_up, "request")),
            )
