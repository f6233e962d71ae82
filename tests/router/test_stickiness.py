"""A2, B13: what it gains to keep a session on its Decoder, and what uneven load costs, on a simulated fleet."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.stickiness import Result, Workload, measure, p95

SMALL = Workload(sessions=120, turns=5, arrival=20, think=4, prefillers=6, decoders=3)
GROWING = Workload(sessions=200, turns=6, arrival=20, think=4, decoders=4, late_decoders=3, late_seconds=20)
BOUND, NO_BOUND = 8, 100_000


def test_stickiness_spares_the_prefillers_and_the_wait() -> None:
    free, sticky = measure(SMALL, None), measure(SMALL, BOUND)
    assert sticky.prefilled < 0.5 * free.prefilled
    assert p95(sticky.first_tokens) < 0.5 * p95(free.first_tokens)
    assert sticky.served == free.served == SMALL.sessions * SMALL.turns


def test_without_a_bound_a_fleet_that_grew_is_used_worse() -> None:
    bounded, boundless = measure(GROWING, BOUND), measure(GROWING, NO_BOUND)
    assert p95(bounded.ends) < 0.9 * p95(boundless.ends)
    assert bounded.finished < boundless.finished


def test_the_same_seed_gives_the_same_figures() -> None:
    runs: list[Result] = [measure(replace(SMALL, sessions=20), BOUND, seed=3) for _ in range(2)]
    assert runs[0] == runs[1]
