"""Figures that are counted in plain numbers look as Prometheus's own do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from schedloom.router.figures import OwnCounts, OwnDurations, SharedCounts, SharedDurations
from schedloom.router.metrics import Metrics

LIMITS = (0.5, 1, 2.5)


@pytest.mark.parametrize("taken", [(), (0.1,), (0.5, 1.0, 2.5), (0.6, 99.0, 0.4)])
def test_durations_are_shown_as_prometheus_shows_them(taken: tuple[float, ...]) -> None:
    own, theirs = CollectorRegistry(), CollectorRegistry()
    for durations in (
        OwnDurations("took", "How long.", ("route",), LIMITS, own),
        SharedDurations("took", "How long.", ("route",), LIMITS, theirs),
    ):
        for seconds in taken:
            durations.took(("pd",), seconds)
            durations.took(("append",), seconds)
    assert shown(own) == shown(theirs)


def test_counts_are_shown_as_prometheus_shows_them() -> None:
    own, theirs = CollectorRegistry(), CollectorRegistry()
    labels = ("route", "outcome")
    for counts in (OwnCounts("seen", "How many.", labels, own), SharedCounts("seen", "How many.", labels, theirs)):
        for outcome in ("served", "failed", "served"):
            counts.count(("pd", outcome))
    assert shown(own) == shown(theirs)


def shown(registry: CollectorRegistry) -> set[str]:
    """Without the instants at which figures were made."""
    return {line for line in generate_latest(registry).decode().splitlines() if "_created" not in line}


def test_every_figure_is_on_the_page_once() -> None:
    families = Metrics().registry.collect()
    names = [f"{one.name}_total" if one.type == "counter" else one.name for one in families]
    page = (Path(__file__).parents[2] / "docs" / "router" / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(schedloom_router_\w+)` \|", page, re.MULTILINE)) == sorted(names)
