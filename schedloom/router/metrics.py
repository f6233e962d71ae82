"""Counters and histograms. No label depends on what clients send."""

from __future__ import annotations

import time
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

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
        self.requests = Counter(
            "schedloom_router_requests",
            "Requests that ended, by the route of the last attempt and by outcome.",
            ["route", "outcome"],
            registry=self.registry,
        )
        self._in_flight = 0
        self._gauge = Gauge(
            "schedloom_router_in_flight", "Requests under way.", registry=self.registry, multiprocess_mode="livesum"
        )
        if shared is None:
            self._gauge.set_function(lambda: self._in_flight)
        self.local_attempts = Counter(
            "schedloom_router_local_attempts", "Local attempts that ended.", registry=self.registry
        )
        self.local_results = Counter(
            "schedloom_router_local_attempt_results",
            "Local attempts by result.",
            ["result"],
            registry=self.registry,
        )
        self.handed_back = Counter(
            "schedloom_router_handed_back", "Requests that an engine handed back.", registry=self.registry
        )
        self.continuations = Counter(
            "schedloom_router_continuations",
            "Requests that an engine handed back, by what became of them.",
            ["result"],
            registry=self.registry,
        )
        self.retries = Counter(
            "schedloom_router_retries", "Second passes through Prefiller and Decoder.", registry=self.registry
        )
        self.session_store_errors = Counter(
            "schedloom_router_session_store_errors",
            "Questions to the store of sessions that it failed to answer.",
            registry=self.registry,
        )
        self.tokenizing = Histogram(
            "schedloom_router_tokenize_seconds",
            "What it cost to have a prompt tokenized for routing.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.policy_errors = Counter(
            "schedloom_router_policy_errors", "Exceptions in policies.", ["policy"], registry=self.registry
        )
        self.first_byte = Histogram(
            "schedloom_router_time_to_first_byte_seconds",
            "From a request's arrival to the first byte of its answer, by route.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )

        self._first_byte_by: dict[str, Histogram] = {}
        self._requests_by: dict[tuple[str, str], Counter] = {}

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
