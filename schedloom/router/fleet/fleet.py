"""The engines: which there are, and who takes the next request."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import IntEnum
from typing import Any, Literal, TypeVar

from schedloom.core.routing import SessionOwner
from schedloom.router.failures import Failure
from schedloom.router.fleet.breaker import Clock
from schedloom.router.fleet.roster import Roster
from schedloom.router.fleet.worker import LEAVING, SERVING, Health, Target, Worker
from schedloom.router.transfer.modes import Mode

_Able = TypeVar("_Able")


class Doubt(IntEnum):
    """What one request holds against an engine that was asked. NONE: it turned the request away, as it may. PROVED: so
    it did, or it prefilled, and another failed. DOUBTED: it prefilled for a Decoder that failed, perhaps for what it
    got, or was not reached in time. FAILED: it did not do its part.
    """

    PROVED = -1
    NONE = 0
    DOUBTED = 1
    FAILED = 2


Doubts = Mapping[Worker, Doubt]
NO_DOUBTS: Doubts = {}


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
    def serves(self) -> Literal["all", "some", "nothing"]:
        """What may begin: ``some`` is what Decoders do alone, the next turns of sessions that they hold among it."""
        if self.has_both:
            return "all"
        return "some" if self._usable_decoders else "nothing"

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
    def lacking(self) -> list[str]:
        """The kinds of engine of which nobody may begin anything."""
        usable = {"Prefiller": self._usable_prefillers, "Decoder": self._usable_decoders}
        return [kind for kind, able in usable.items() if not able]

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
    return Failure.own(503, f"No {kind} is available.", f"no_{kind.lower()}")


def build_fleet(roster: Roster, clock: Clock = time.monotonic) -> Fleet:
    return Fleet([Worker(name, engine, clock) for name, engine in roster.engines.items()])


def _nothing() -> None:
    return None
