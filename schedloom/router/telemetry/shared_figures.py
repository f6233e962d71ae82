"""The figures of a router with several processes: each keeps its own in a file, and any of them tells the sums."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

_NEW = ".new"

Families = list[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]]
"""For each figure its name, meaning and kind, and samples: name, labels, value."""


class SharedFigures(Collector):
    """The sums of what the processes of one folder keep there, each in a file of its own, which ``file`` is for this.

    What its predecessor counted is counted on. ``keep`` is called again and again, so that a process that is killed
    takes with it what it counted since.
    """

    def __init__(self, file: Path, registry: CollectorRegistry) -> None:
        self._file = file
        self._registry = registry
        self._inherited = _counted(_read(file))

    def keep(self) -> None:
        _write(self._file, _told([*self._registry.collect(), *_metrics(self._inherited)]))

    def collect(self) -> Iterator[Metric]:
        self.keep()
        files = (file for file in sorted(self._file.parent.iterdir()) if file.suffix != _NEW)
        kept = [family for file in files for family in _read(file)]
        yield from _summed(_metrics(kept))


def bury(file: Path) -> None:
    """Its process has died: what it counted stays, what was at the moment does not."""
    _write(file, _counted(_read(file)))


def _metrics(families: Families) -> Iterator[Metric]:
    for name, meaning, kind, samples in families:
        metric = Metric(name, meaning, kind)
        for sample in samples:
            metric.add_sample(*sample)
        yield metric


def _summed(metrics: Iterable[Metric]) -> list[Metric]:
    """One of each name, in which what has the same labels is added up."""
    sums: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for metric in metrics:
        sums.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
        of = values.setdefault(metric.name, {})
        for sample in metric.samples:
            key = sample.name, tuple(sample.labels.items())
            of[key] = of.get(key, 0.0) + sample.value
    for name, metric in sums.items():
        for (sample_name, labels), value in values[name].items():
            metric.add_sample(sample_name, dict(labels), value)
    return list(sums.values())


def _told(metrics: Iterable[Metric]) -> Families:
    """Without the instants at which figures were made, of which there is no sum."""
    return [
        (
            metric.name,
            metric.documentation,
            metric.type,
            [(one.name, one.labels, one.value) for one in metric.samples if not one.name.endswith("_created")],
        )
        for metric in _summed(metrics)
    ]


def _counted(families: Families) -> Families:
    return [family for family in families if family[2] != "gauge"]


def _read(file: Path) -> Families:
    try:
        read: Any = orjson.loads(file.read_bytes())
    except FileNotFoundError:
        return []
    return list(map(tuple, read))


def _write(file: Path, families: Families) -> None:
    """Never seen half written. Where there is no room, what was written before stays: figures take no process down."""
    new = file.with_suffix(_NEW)
    try:
        new.write_bytes(orjson.dumps(families))
        os.replace(new, file)
    except OSError as error:
        log.error("figures cannot be kept in %s now: %s", file.parent, error.strerror)
