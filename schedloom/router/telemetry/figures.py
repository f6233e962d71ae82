"""Figures of every request: counted in plain numbers, and put in Prometheus's form when it asks for them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]


class Counts(Collector):
    """How often something happened, by its labels."""

    def __init__(self, name: str, meaning: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._about = name, meaning, labels
        self._counts: dict[Labels, int] = defaultdict(int)
        registry.register(self)

    def count(self, labels: Labels) -> None:
        self._counts[labels] += 1

    def collect(self) -> Iterator[CounterMetricFamily]:
        name, meaning, labels = self._about
        family = CounterMetricFamily(name, meaning, labels=labels)
        for values, count in self._counts.items():
            family.add_metric(values, count)
        yield family


class Durations(Collector):
    """How long something took, by its labels."""

    def __init__(
        self, name: str, meaning: str, labels: Sequence[str], limits: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._about = name, meaning, labels
        self._limits = limits
        self._counts: dict[Labels, list[int]] = defaultdict(lambda: [0] * (len(limits) + 1))
        self._sums: dict[Labels, float] = defaultdict(float)
        registry.register(self)

    def took(self, labels: Labels, seconds: float) -> None:
        self._counts[labels][bisect_left(self._limits, seconds)] += 1
        self._sums[labels] += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        name, meaning, labels = self._about
        family = HistogramMetricFamily(name, meaning, labels=labels)
        limits = list(map(floatToGoString, (*self._limits, math.inf)))
        for values, counts in self._counts.items():
            family.add_metric(values, list(zip(limits, accumulate(counts), strict=True)), self._sums[values])
        yield family


class Levels(Collector):
    """How much there is at the moment, by labels: all that was told last, and nothing that was told before."""

    def __init__(self, name: str, meaning: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._about = name, meaning, labels
        self._levels: Mapping[Labels, float] = {}
        registry.register(self)

    def tell(self, levels: Mapping[Labels, float]) -> None:
        self._levels = levels

    def collect(self) -> Iterator[GaugeMetricFamily]:
        name, meaning, labels = self._about
        family = GaugeMetricFamily(name, meaning, labels=labels)
        for values, level in self._levels.items():
            family.add_metric(values, level)
        yield family
