"""One engine: how it is, what is under way on it, and how attempts at it end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any

from schedloom.core.routing import SessionOwner
from schedloom.core.wire import EngineContract
from schedloom.router.failures import Failure
from schedloom.router.fleet.breaker import Breaker, Clock
from schedloom.router.http.upstream import UpstreamResponse, header
from schedloom.router.settings import WorkerSettings
from schedloom.router.transfer.modes import Mode, mode_of

log = logging.getLogger(__name__)

APPEND_FEATURE = "append_prefill"
RECOMPUTE_FEATURE = "recompute"

LONGEST_SPARED_SECONDS = 16.0
"""For an engine that says no more than that it is full."""


class Health(Enum):
    """READY: serves. SUSPECT: a connection to it just failed, it is being looked at; taken only when nobody
    is ready. DRAINING: it could serve, but finishes only what is under way. DRAINED: nothing of that is left. DOWN: not
    reachable. QUARANTINED: reachable, but it does not fit the fleet.
    """

    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    DRAINED = "drained"
    DOWN = "down"
    QUARANTINED = "quarantined"


SERVING = (Health.READY, Health.SUSPECT)
LEAVING = (Health.DRAINING, Health.DRAINED)


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """An instance, the life it is in, and a rank of it."""

    worker: Worker
    rank: int
    owner: SessionOwner

    @classmethod
    def of(cls, worker: Worker, rank: int | None = None) -> Target:
        targets = worker.targets
        if rank is None:
            rank = worker.least_busy_rank() if len(targets) > 1 else 0
        return targets[rank]

    @property
    def name(self) -> str:
        return self.worker.name

    @property
    def origin(self) -> str:
        return self.worker.origin

    @property
    def contract(self) -> EngineContract:
        return self.worker.contract

    @property
    def in_flight(self) -> int:
        return self.worker.busy[self.rank]

    @property
    def in_flight_bytes(self) -> int:
        return self.worker.bytes[self.rank]


class Worker:
    """One engine and what is under way on it, per data-parallel rank.

    ``lends`` counts Prefillers that pull KV from it, ``misses`` looks in a row that failed. ``refused_in`` is the life
    in which it refused the router's key, ``told`` is what each rank told of its transfers last. While it ``drains`` it
    does not serve, however well it is.
    """

    def __init__(self, name: str, settings: WorkerSettings, clock: Clock = time.monotonic) -> None:
        self.name = name
        self.origin = settings.url
        self.settings = settings
        self.health = Health.DOWN
        self.trouble = "not reached yet"
        self.busy = [0]
        self.bytes = [0]
        self.lives = 0
        self.drains = settings.drain
        self.lends = 0
        self.misses = 0
        self.refused_in = ""
        self.told: dict[int, Any] = {}
        self.mode = Mode.PULL
        self.breaker = Breaker(clock, self._tell_trust)
        self.full_until = 0.0
        self.spared_seconds = 0.0
        self.on_change: Callable[[], None] = _nothing
        self._clock = clock
        self.targets: list[Target] = []
        self.contract: EngineContract = None  # type: ignore[assignment]  # until it was reached
        self._turn = 0

    @property
    def known(self) -> bool:
        return self.contract is not None

    @property
    def in_flight(self) -> int:
        return sum(self.busy)

    @property
    def load(self) -> float:
        """Requests under way per rank."""
        return sum(self.busy) / len(self.targets)

    @property
    def is_full(self) -> bool:
        """Whether it has just said that it takes no more for now."""
        return self.full_until > 0 and self._clock() < self.full_until

    @property
    def can_prefill(self) -> bool:
        return self.settings.role != "decode" and self.contract.can_prefill

    @property
    def can_decode(self) -> bool:
        return self.settings.role != "prefill" and self.contract.can_decode

    @property
    def takes_local_attempts(self) -> bool:
        return APPEND_FEATURE in self.contract.features and self.contract.prefix_caching

    @property
    def resumes(self) -> bool:
        """Whether it hands requests back for lack of KV blocks, and continues what others handed back."""
        return RECOMPUTE_FEATURE in self.contract.features

    def join(self, contract: EngineContract) -> None:
        """It was reached and fits. Requests of an earlier life that still unwind count on the ranks they were
        on.
        """
        missing = contract.data_parallel_size - len(self.busy)
        self.busy.extend([0] * max(0, missing))
        self.bytes.extend([0] * max(0, missing))
        self._renew_targets(contract)
        self.contract = contract
        self.mode = mode_of(contract)
        self.trouble = ""
        if not self.drains:
            self.health = Health.READY
        elif self.health is not Health.DRAINED:
            self.health = Health.DRAINING
        self.on_change()

    def _tell_trust(self, seconds: float | None) -> None:
        """One that is left out answers looks at it as before, so that only the log tells."""
        if seconds is None:
            log.info("%s serves its requests again", self.name)
        else:
            log.warning("%s fails its requests, and gets none for %g s unless others do no better", self.name, seconds)

    def drain(self) -> None:
        """Nothing new is to be sent to it."""
        self.drains = True
        if self.health in SERVING:
            self.health = Health.DRAINING
            self.on_change()

    def drained(self) -> None:
        """Nothing is left of what was under way."""
        self.health = Health.DRAINED
        self.on_change()

    def stay(self) -> None:
        """It does not drain any more; how it is, the next look tells."""
        self.drains = False
        if self.health in LEAVING:
            self.health = Health.SUSPECT
            self.on_change()

    def _renew_targets(self, contract: EngineContract) -> None:
        ranks = range(contract.data_parallel_size)
        if len(self.targets) == len(ranks) and self.targets[0].owner.epoch == contract.epoch:
            return
        self.targets = [Target(self, rank, SessionOwner(self.name, contract.epoch, rank)) for rank in ranks]

    def leave(self, health: Health, trouble: str) -> None:
        self.suspect()
        self.health = health
        self.trouble = trouble
        self.on_change()

    def suspect(self) -> None:
        """It may have been restarted: for an engine that does not tell its epoch, a new life begins."""
        if self.health is Health.READY or self.health in LEAVING:
            self.lives += 1
        if self.health is Health.READY:
            self.health = Health.SUSPECT
            self.on_change()

    def least_busy_rank(self) -> int:
        ranks = range(len(self.targets))
        self._turn += 1
        return min(ranks, key=lambda rank: (self.busy[rank], (rank - self._turn) % len(ranks)))

    def has_rank(self, rank: int) -> bool:
        return 0 <= rank < len(self.targets)

    def serving(self, rank: int, size: int = 0) -> Service:
        """Counts one request, whose body has ``size`` bytes, while it lasts, whichever way it ends."""
        return Service(self, rank, size)

    def is_full_for(self, seconds: float) -> None:
        """Longer each time, until it takes a request again."""
        self.spared_seconds = max(seconds, min(2 * self.spared_seconds, LONGEST_SPARED_SECONDS))
        self.full_until = self._clock() + self.spared_seconds


def _nothing() -> None:
    return None


class Service:
    """One request on one worker, and what it says about the worker. Clients' errors and disconnects say
    nothing, and a worker that is full is not broken.
    """

    __slots__ = ("rank", "size", "success", "worker")

    def __init__(self, worker: Worker, rank: int, size: int = 0) -> None:
        self.worker = worker
        self.rank = rank
        self.size = size
        self.success: bool | None = None

    def __enter__(self) -> Service:
        worker, rank = self.worker, self.rank
        worker.busy[rank] += 1
        worker.bytes[rank] += self.size
        if worker.breaker.is_open:
            worker.breaker.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        worker, rank = self.worker, self.rank
        worker.busy[rank] -= 1
        worker.bytes[rank] -= self.size
        if kind is not None and isinstance(error, Failure):
            self._ended_with(error)
        if not (self.success and worker.breaker.is_clean):
            worker.breaker.end(self.success)

    def _ended_with(self, failure: Failure) -> None:
        """An error may also be told, or be found, behind the head of a fine answer."""
        failure.culprit = self.worker
        if failure.is_the_engines_fault and failure.status != 503:
            self.success = False

    def failed(self) -> None:
        self.success = False

    def answered(self, response: UpstreamResponse) -> UpstreamResponse:
        """An answer's head is there. Returns the answer to read on from."""
        status = response.status
        if status < 400:
            self.success = True
            self.worker.spared_seconds = 0.0
        elif status in (429, 503):
            self.worker.is_full_for(_seconds(header(response.headers, b"retry-after")))
        elif status >= 500:
            self.success = False
        return response


def _seconds(retry_after: bytes | None) -> float:
    """How long a full worker is left alone; within a minute, whatever it says."""
    try:
        return min(max(float(retry_after or b"1"), 0.1), 60.0)
    except ValueError:
        return 1.0
