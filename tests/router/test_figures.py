"""Figures that are counted in plain numbers look as Prometheus's own do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from schedloom.router.telemetry.figures import Counts, Durations
from schedloom.router.telemetry.metrics import Metrics
from schedloom.router.telemetry.shared_figures import SharedFigures, bury

LIMITS = (0.5, 1, 2.5)


@pytest.mark.parametrize("taken", [(), (0.1,), (0.5, 1.0, 2.5), (0.6, 99.0, 0.4)])
def test_durations_are_shown_as_prometheus_shows_them(taken: tuple[float, ...]) -> None:
    own, theirs = CollectorRegistry(), CollectorRegistry()
    durations = Durations("took", "How long.", ("route",), LIMITS, own)
    histogram = Histogram("took", "How long.", ("route",), buckets=LIMITS, registry=theirs)
    for seconds in taken:
        for route in ("pd", "append"):
            durations.took((route,), seconds)
            histogram.labels(route).observe(seconds)
    assert shown(own) == shown(theirs)


def test_counts_are_shown_as_prometheus_shows_them() -> None:
    own, theirs = CollectorRegistry(), CollectorRegistry()
    counts = Counts("seen", "How many.", ("route", "outcome"), own)
    counter = Counter("seen", "How many.", ("route", "outcome"), registry=theirs)
    for outcome in ("served", "failed", "served"):
        counts.count(("pd", outcome))
        counter.labels("pd", outcome).inc()
    assert shown(own) == shown(theirs)


class Process:
    """One of those that share figures in a folder."""

    def __init__(self, file: Path) -> None:
        self.registry = CollectorRegistry()
        self.counts = Counts("seen", "How many.", ("route",), self.registry)
        self.durations = Durations("took", "How long.", ("route",), LIMITS, self.registry)
        self.retries = Counter("retries", "Again.", registry=self.registry)
        self.load = Gauge("load", "Now.", ("engine",), registry=self.registry)
        self.shared = SharedFigures(file, self.registry)

    def work(self, *routes: str) -> None:
        for route in routes:
            self.counts.count((route,))
            self.durations.took((route,), 0.75)
            self.retries.inc()
            self.load.labels(route).inc()

    def told(self) -> set[str]:
        return {line for line in generate_latest(self.shared).decode().splitlines() if not line.startswith("#")}


def test_several_processes_tell_the_sums_as_one_process_that_did_it_all(tmp_path: Path) -> None:
    one, two, alone = (Process(tmp_path / name) for name in "012")
    one.work("pd", "append")
    two.work("pd", "pd", "decode")
    alone.work("pd", "append", "pd", "pd", "decode")
    two.shared.keep()
    assert one.told() == shown(alone.registry) - {line for line in shown(alone.registry) if line.startswith("#")}
    one.work("pd")
    assert 'seen_total{route="pd"} 4.0' in one.told() & two.told()
    assert "# TYPE took histogram" in generate_latest(one.shared).decode()


def test_a_process_that_dies_leaves_what_it_counted_to_its_successor(tmp_path: Path) -> None:
    one, two = Process(tmp_path / "0"), Process(tmp_path / "1")
    two.work("pd", "pd")
    two.shared.keep()
    two.work("pd")
    bury(tmp_path / "1")
    assert {'seen_total{route="pd"} 2.0', "retries_total 2.0", 'took_count{route="pd"} 2.0'} <= one.told()
    assert not any(line.startswith("load") for line in one.told())
    for number in range(1, 4):
        heir = Process(tmp_path / "1")
        heir.work("pd")
        heir.shared.keep()
        assert {f'seen_total{{route="pd"}} {2 + number}.0', 'load{engine="pd"} 1.0'} <= one.told()
        bury(tmp_path / "1")


def test_a_process_that_dies_before_it_counts_leaves_nothing(tmp_path: Path) -> None:
    bury(tmp_path / "1")
    one = Process(tmp_path / "0")
    one.work("pd")
    assert 'seen_total{route="pd"} 1.0' in one.told()


def shown(registry: CollectorRegistry) -> set[str]:
    """Without the instants at which figures were made."""
    return {line for line in generate_latest(registry).decode().splitlines() if "_created" not in line}


def test_every_figure_is_on_the_page_once() -> None:
    families = Metrics().registry.collect()
    names = [f"{one.name}_total" if one.type == "counter" else one.name for one in families]
    page = (Path(__file__).parents[2] / "docs" / "router" / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(schedloom_router_\w+)` \|", page, re.MULTILINE)) == sorted(names)


def test_a_full_disk_takes_nothing_that_was_told_and_nobody_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = Process(tmp_path / "0"), Process(tmp_path / "1")
    two.work("pd")
    two.shared.keep()
    (tmp_path / "1.new").symlink_to("/dev/full")
    two.work("pd")
    two.shared.keep()
    bury(tmp_path / "1")
    assert 'seen_total{route="pd"} 1.0' in one.told()
    assert caplog.text.count("No space left on device") == 2
