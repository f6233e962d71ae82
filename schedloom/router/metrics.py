"""Counters and histograms. No label depends on what clients send."""

from __future__ import annotations

import time
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

_PREFIX = "schedloom_router_"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The router's figures, in a registry of their own; those of all processes where they share a folder.

    Local attempts are counted when they end: ``attempts`` is always the sum of ``hit`` (the Decoder's answer
    began), ``rejected`` (the Decoder turned it away) and ``error`` (anything else, clients that left early
    included). Requests that engines handed back are counted when their continuation ends: ``handed_back`` is
    always the sum of ``continued`` (served, or handed back again) and ``failed``.
    """

    def __init__(self, shared: Path | None = None) -> None:
        """``shared`` is the folder that ``PROMETHEUS_MULTIPROC_DIR`` named when this process began."""
        self.registry = CollectorRegistry()
        self._shared = shared
        self._in_flight = 0
        self._gauge = self._load()
        self.requests = self._counter(
            "requests", "Requests that ended, by the route of the last attempt and by outcome.", "route", "outcome"
        )
        self.local_attempts = self._counter("local_attempts", "Local attempts that ended.")
        self.local_results = self._counter("local_attempt_results", "Local attempts by result.", "result")
        self.handed_back = self._counter("handed_back", "Requests that an engine handed back.")
        self.continuations = self._counter(
            "continuations", "Requests that an engine handed back, by what became of them.", "result"
        )
        self.retries = self._counter("retries", "Second passes through Prefiller and Decoder.")
        self.session_store_errors = self._counter(
            "session_store_errors", "Questions to the store of sessions that it failed to answer."
        )
        self.policy_errors = self._counter("policy_errors", "Exceptions in policies.", "policy")
        self.tokenizing = self._seconds("tokenize_seconds", "What it cost to have a prompt tokenized for routing.")
        self.first_byte = self._seconds(
            "time_to_first_byte_seconds",
            "From a request's arrival to the first byte of its answer, by route.",
            "route",
        )
        self._first_byte_by: dict[str, Histogram] = {}
        self._requests_by: dict[tuple[str, str], Counter] = {}

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"{_PREFIX}{name}", meaning, labels, registry=self.registry)

    def _seconds(self, name: str, meaning: str, *labels: str) -> Histogram:
        return Histogram(f"{_PREFIX}{name}", meaning, labels, buckets=_SECONDS, registry=self.registry)

    def _load(self) -> Gauge:
        """Read when it is asked for; of several processes, each tells its own as it changes."""
        gauge = Gauge(f"{_PREFIX}in_flight", "Requests under way.", registry=self.registry, multiprocess_mode="livesum")
        if self._shared is None:
            gauge.set_function(lambda: self._in_flight)
        return gauge

    def began(self, at: float, route: str) -> None:
        """The answer to a request that came ``at`` an instant of the performance counter begins."""
        child = self._first_byte_by.get(route)
        if child is None:
            child = self._first_byte_by[route] = self.first_byte.labels(route or "none")
        child.observe(time.perf_counter() - at)

    def ended(self, route: str, outcome: str) -> None:
        child = self._requests_by.get((route, outcome))
        if child is None:
            child = self._requests_by[route, outcome] = self.requests.labels(route or "none", outcome)
        child.inc()

    def local_attempt(self, result: str) -> None:
        self.local_attempts.inc()
        self.local_results.labels(result).inc()

    def continuation(self, result: str) -> None:
        self.handed_back.inc()
        self.continuations.labels(result).inc()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @in_flight.setter
    def in_flight(self, number: int) -> None:
        self._in_flight = number
        if self._shared is not None:
            self._gauge.set(number)

    def exposition(self) -> bytes:
        if self._shared is None:
            return generate_latest(self.registry)
        summed = CollectorRegistry()
        MultiProcessCollector(summed, str(self._shared))  # type: ignore[no-untyped-call]
        return generate_latest(summed)
