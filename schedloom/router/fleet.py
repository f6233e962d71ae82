"""The engines: which there are, how they are, and who takes the next request."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import TracebackType
from typing import Any, TypeVar

from schedloom.core.routing import SessionOwner
from schedloom.core.wire import EngineContract
from schedloom.router.breaker import Breaker, Clock
from schedloom.router.failures import Failure
from schedloom.router.roster import Roster
from schedloom.router.settings import WorkerSettings
from schedloom.router.transfer.modes import Mode, mode_of
from schedloom.router.upstream import UpstreamResponse, header

_Able = TypeVar("_Able")

APPEND_FEATURE = "append_prefill"
RECOMPUTE_FEATURE = "recompute"

LONGEST_SPARED_SECONDS = 16.0
"""For an engine that says no more than that it is full."""


class Doubt(IntEnum):
    """What one request holds against an engine that was asked. NONE: it turned the request away, as it may. PROVED: so
    it did, and another failed. DOUBTED: it prefilled for a Decoder that failed, perhaps for what it got, or was not
    reached in time. FAILED: it did not do its part.
    """

    PROVED = -1
    NONE = 0
    DOUBTED = 1
    FAILED = 2


Doubts = Mapping["Worker", Doubt]
NO_DOUBTS: Doubts = {}


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
        self.breaker = Breaker(clock)
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


class Fleet:
    """All engines, in the order of configuration, newcomers last. ``on_draining`` is called whenever one has changed
    while some are DRAINING.

    Those that drain are chosen only where nobody else is left, for what had begun before.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.on_draining: Callable[[], None] = _nothing
        self._prefiller_turns = itertools.count()
        self._decoder_turns = itertools.count()
        self._become(workers)

    def _become(self, workers: Sequence[Worker]) -> None:
        self.workers = tuple(workers)
        self._by_name = {worker.name: worker for worker in workers}
        for worker in workers:
            worker.on_change = self._regroup
        self._regroup()

    def add(self, worker: Worker) -> None:
        self._become([*self.workers, worker])

    def forget(self, worker: Worker) -> None:
        worker.on_change = _nothing
        self._become([one for one in self.workers if one is not worker])

    def _regroup(self) -> None:
        usable = [worker for worker in self.workers if worker.health in SERVING]
        leaving = [worker for worker in self.workers if worker.health in LEAVING]
        self._usable_prefillers = [worker for worker in usable if worker.can_prefill]
        self._usable_decoders = [worker for worker in usable if worker.can_decode]
        self.prefillers = [one for one in self._usable_prefillers if one.health is Health.READY]
        self.decoders = [one for one in self._usable_decoders if one.health is Health.READY]
        self.resumers = [one for one in self._usable_decoders if one.resumes]
        self._last_prefillers = self._usable_prefillers or [worker for worker in leaving if worker.can_prefill]
        self._last_decoders = self._usable_decoders or [worker for worker in leaving if worker.can_decode]
        self._last_resumers = self.resumers or [one for one in leaving if one.can_decode and one.resumes]
        self.mode = self._last_prefillers[0].mode if self._last_prefillers else Mode.PULL
        """How KV travels in this fleet; its engines agree."""
        if any(worker.health is Health.DRAINING for worker in leaving):
            self.on_draining()

    @property
    def serves(self) -> bool:
        return bool(self.prefillers and self.decoders)

    def find(self, name: str) -> Worker | None:
        return self._by_name.get(name)

    def owner_is_here(self, owner: SessionOwner) -> bool:
        """Whether the instance lives, and still the life in which it served the session, and is not left out."""
        worker = self.find(owner.worker)
        if worker is None or worker.health is not Health.READY or not worker.breaker.allows:
            return False
        return worker.contract.epoch == owner.epoch and worker.has_rank(owner.rank)

    def lender(self, owner: SessionOwner) -> Worker | None:
        """The instance, where others may pull what it kept of a session: it may drain meanwhile."""
        worker = self.find(owner.worker)
        if worker is None or worker.health is not Health.DRAINING:
            return worker if self.owner_is_here(owner) else None
        return worker if worker.contract.epoch == owner.epoch and worker.has_rank(owner.rank) else None

    def choose_prefiller(self, doubts: Doubts = NO_DOUBTS) -> Worker:
        """The least busy, among equals each in turn. Raises Failure (503) when there is none."""
        able = self._last_prefillers
        return able[0] if len(able) == 1 else _least_busy(able, "Prefiller", next(self._prefiller_turns), doubts)

    def choose_decoder(self, doubts: Doubts = NO_DOUBTS) -> Worker:
        """The least busy, among equals each in turn. Raises Failure (503) when there is none."""
        able = self._last_decoders
        return able[0] if len(able) == 1 else _least_busy(able, "Decoder", next(self._decoder_turns), doubts)

    def choose_resumer(self, doubts: Doubts = NO_DOUBTS) -> Worker:
        """The least busy Decoder that continues what others handed back. Raises Failure (503) when there is none."""
        return _least_busy(self._last_resumers, "Decoder", next(self._decoder_turns), doubts)

    def best_prefillers(self, doubts: Doubts = NO_DOUBTS) -> list[Target]:
        """Every rank of those who are in the best state to serve. Raises Failure (503) when there is nobody."""
        return _best(_admitted(self._last_prefillers), "Prefiller", doubts)

    def best_decoders(self, doubts: Doubts = NO_DOUBTS) -> list[Target]:
        """Every rank of those who are in the best state to serve. Raises Failure (503) when there is nobody."""
        return _best(_admitted(self._last_decoders), "Decoder", doubts)

    @property
    def has_both(self) -> bool:
        """Whether a request that needs a Prefiller and a Decoder may begin."""
        return bool(self._usable_prefillers and self._usable_decoders)

    def require_decoder(self) -> None:
        """Raises Failure (503) when no request may begin at all."""
        if not self._usable_decoders:
            raise _nobody("Decoder")

    def require_both(self) -> None:
        """Raises Failure (503) when no request that needs both may begin."""
        if not self._usable_decoders:
            raise _nobody("Decoder")
        if not self._usable_prefillers:
            raise _nobody("Prefiller")

    def require_last_decoder(self) -> None:
        """Raises Failure (503) when nobody is there to hand a prefill over to, of those who drain neither."""
        if not self._last_decoders:
            raise _nobody("Decoder")

    def is_last(self, worker: Worker) -> bool:
        """Whether nobody else is there to do what ``worker`` can."""
        if worker.can_prefill and not self.has_other_prefillers([worker]):
            return True
        return worker.can_decode and not self.has_other_decoders([worker])

    def has_other_prefillers(self, asked: Collection[Worker]) -> bool:
        """Whether others than ``asked`` are there, whatever became of those meanwhile."""
        return not set(_admitted(self._last_prefillers)).issubset(asked)

    def has_other_decoders(self, asked: Collection[Worker]) -> bool:
        """Likewise."""
        return not set(_admitted(self._last_decoders)).issubset(asked)


def _admitted(pool: list[Worker]) -> list[Worker]:
    """``pool`` without those that fail again and again: at most half of it, and never the last."""
    left_out = [worker for worker in pool if worker.breaker.is_open and not worker.breaker.allows]
    if not left_out:
        return pool
    longest = sorted(left_out, key=lambda worker: worker.breaker.opened_at)[: len(pool) // 2]
    return [worker for worker in pool if worker not in longest]


def _least_busy(pool: list[Worker], kind: str, turn: int, doubts: Doubts) -> Worker:
    if not pool:
        raise _nobody(kind)
    able = _admitted(pool)
    return in_turn(able, [(*_reluctance(worker, doubts), worker.load) for worker in able], turn)


def in_turn(able: Sequence[_Able], burdens: Sequence[Any], turn: int) -> _Able:
    """Of those with the least burden the one whose turn it is."""
    least = min(burdens)
    equals = [one for one, burden in zip(able, burdens, strict=True) if burden == least]
    return equals[turn % len(equals)]


def _best(able: list[Worker], kind: str, doubts: Doubts) -> list[Target]:
    if not able:
        raise _nobody(kind)
    states = {worker: _reluctance(worker, doubts) for worker in able}
    best = min(states.values())
    return [target for worker, state in states.items() if state == best for target in worker.targets]


def _reluctance(worker: Worker, doubts: Doubts) -> tuple[bool, bool, bool, bool, int]:
    """Who failed somebody else just now gets its share all the same, but not of requests that have been elsewhere."""
    is_suspect, is_full = worker.health is Health.SUSPECT, worker.is_full
    if not doubts:
        return False, is_suspect, is_full, False, Doubt.NONE
    doubt = doubts.get(worker, Doubt.NONE)
    return doubt is Doubt.FAILED, is_suspect, is_full, not worker.breaker.is_clean, doubt


def _nobody(kind: str) -> Failure:
    return Failure.own(503, f"No {kind} is available.", f"no_{kind.lower()}").retry_after(1)


def build_fleet(roster: Roster, clock: Clock = time.monotonic) -> Fleet:
    return Fleet([Worker(name, engine, clock) for name, engine in roster.engines.items()])
