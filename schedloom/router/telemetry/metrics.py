"""Counters and histograms. No label depends on what clients send."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from schedloom.core.routing import Leg
from schedloom.router.telemetry.figures import Counts, Durations, Levels
from schedloom.router.telemetry.shared_figures import SharedFigures

if TYPE_CHECKING:
    from schedloom.router.reply import Reply

_PREFILL, _DECODE, _APPEND = ((leg.value,) for leg in (Leg.PREFILL, Leg.DECODE, Leg.APPEND))
_PREFIX = "schedloom_router_"
_SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The router's figures, in a registry of their own; those of all processes where they share theirs in files.

    Local attempts are counted when they end: ``attempts`` is always the sum of ``hit`` (the Decoder's answer
    began), ``rejected`` (the Decoder turned it away) and ``error`` (anything else, clients that left early
    included). Requests that engines handed back are counted when their continuation ends: ``handed_back`` is
    always the sum of ``continued`` (served, or handed back again) and ``failed``. ``on_asked`` is called before the
    figures are told, for those that are read then.
    """

    def __init__(self, shared: Path | None = None) -> None:
        """``shared`` is the file of this process, in a folder of those of all."""
        self.registry = CollectorRegistry()
        self._shared = None if shared is None else SharedFigures(shared, self.registry)
        self.in_flight = 0
        self.load = self._gauge("in_flight", "Requests under way.")
        self.waiting = self._gauge("waiting", "Requests that wait in line.")
        self.engine_state = self._level(
            "engine_state",
            "1 for the state that an engine is in, 0 for others; summed over the router's processes.",
            *("engine", "state"),
        )
        self.engine_in_flight = self._level(
            "engine_in_flight", "Requests under way on each data-parallel rank of an engine.", "engine", "rank"
        )
        self.on_asked: Callable[[], None] = _nothing
        self._requests = Counts(
            f"{_PREFIX}requests",
            "Requests that ended, by the route of the last attempt and by outcome.",
            ("route", "outcome"),
            self.registry,
        )
        self.local_attempts = self._counter("local_attempts", "Local attempts that ended.")
        self.local_results = self._counter("local_attempt_results", "Local attempts by result.", "result")
        self.handed_back = self._counter("handed_back", "Requests that an engine handed back.")
        self.continuations = self._counter(
            "continuations", "Requests that an engine handed back, by what became of them.", "result"
        )
        self.retries = self._counter("retries", "Second and further tries of requests.")
        self.session_store_errors = self._counter(
            "session_store_errors", "Questions to the store of sessions that it failed to answer."
        )
        self.transfer_refusals = self._counter(
            "transfer_refusals", "Transfer parameters of an engine that were not passed on.", "engine"
        )
        self.policy_errors = self._counter("policy_errors", "Exceptions in policies.", "policy")
        self.tokenizing = self._seconds("tokenize_seconds", "What it cost to have a prompt tokenized for routing.")
        self._first_byte = self._durations(
            "time_to_first_byte_seconds", "From a request's arrival to the first byte of its answer.", "route"
        )
        self._legs = self._durations(
            "leg_seconds",
            "Of attempts that succeeded: of a Prefiller's whole, of a Decoder's to its first byte.",
            "leg",
        )
        self._paces = self._durations(
            "time_per_event_seconds", "Between two events of a stream, on average over the stream.", "route", short=True
        )

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"{_PREFIX}{name}", meaning, labels, registry=self.registry)

    def _seconds(self, name: str, meaning: str) -> Histogram:
        return Histogram(f"{_PREFIX}{name}", meaning, buckets=_SECONDS, registry=self.registry)

    def _durations(self, name: str, meaning: str, label: str, *, short: bool = False) -> Durations:
        """Of every request."""
        return Durations(f"{_PREFIX}{name}", meaning, (label,), _SHORT_SECONDS if short else _SECONDS, self.registry)

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        """Of several processes, each tells its own while it lives."""
        return Gauge(f"{_PREFIX}{name}", meaning, labels, registry=self.registry)

    def _level(self, name: str, meaning: str, *labels: str) -> Levels:
        """Of several processes, each tells its own while it lives."""
        return Levels(f"{_PREFIX}{name}", meaning, labels, self.registry)

    @property
    def are_shared(self) -> bool:
        """Whether they are told by other processes too."""
        return self._shared is not None

    def share(self) -> None:
        """Let other processes tell them as they are now."""
        if self._shared is not None:
            self._shared.keep()

    def began(self, reply: Reply) -> None:
        """The answer to a request begins."""
        now = time.perf_counter()
        self._first_byte.took((reply.decision or "none",), now - reply.came_at)
        if reply.asked_at is not None and reply.status == 200:
            self._legs.took(_APPEND if reply.decision == _APPEND[0] else _DECODE, now - reply.asked_at)

    def prefilled(self, asked_at: float) -> None:
        """A Prefiller that was asked at an instant of the performance counter has answered."""
        self._legs.took(_PREFILL, time.perf_counter() - asked_at)

    def ended(self, route: str, outcome: str, pace: float | None = None) -> None:
        """With the seconds between two events, where it was a stream."""
        self._requests.count((route or "none", outcome))
        if pace is not None:
            self._paces.took((route,), pace)

    def forget(self, engine: str) -> None:
        """It is gone, and its name is not given to another."""
        self.transfer_refusals.remove(engine)

    def local_attempt(self, result: str) -> None:
        self.local_attempts.inc()
        self.local_results.labels(result).inc()

    def continuation(self, result: str) -> None:
        self.handed_back.inc()
        self.continuations.labels(result).inc()

    def exposition(self) -> bytes:
        self.on_asked()
        return generate_latest(self._shared or self.registry)


def _nothing() -> None:
    return None
