"""A2, B13: what it gains to keep a session on its Decoder, and what uneven load costs, on a simulated fleet."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.stickiness import (
    NO_BOUND,
    NOT_STICKY,
    POWER_OF_TWO,
    Result,
    Workload,
    measure,
    p50,
    p95,
    rendezvous,
    sticky,
)

SMALL = Workload(sessions=120, turns=5, arrival=20, think=4, prefillers=6, decoders=3)
GROWING = Workload(sessions=200, turns=6, arrival=20, think=4, decoders=4, late_decoders=3, late_seconds=20)
BOUND = sticky(8)


def test_stickiness_spares_the_prefillers_and_the_wait() -> None:
    free, sticky = measure(SMALL, NOT_STICKY), measure(SMALL, BOUND)
    assert sticky.prefilled < 0.5 * free.prefilled
    assert p95(sticky.first_tokens) < 0.5 * p95(free.first_tokens)
    assert sticky.served == free.served == SMALL.sessions * SMALL.turns


def test_without_a_bound_a_fleet_that_grew_is_used_worse() -> None:
    bounded, boundless = measure(GROWING, BOUND), measure(GROWING, sticky(NO_BOUND))
    assert p95(bounded.ends) < 0.9 * p95(boundless.ends)
    assert bounded.finished < boundless.finished


def test_a_router_that_restarts_finds_its_sessions_where_their_places_are_by_hash() -> None:
    workload = replace(SMALL, restart_at=25.0)
    lost = measure(workload, [*BOUND, *POWER_OF_TWO])
    found = measure(workload, [*BOUND, *rendezvous(2)])
    assert len(lost.after) > 100 and lost.kept == 0
    assert found.kept > 0.7 * len(found.after)
    assert p50(found.after) < 0.1 * p50(lost.after) and p95(found.after) < p95(lost.after)
    assert found.prefilled < lost.prefilled


def test_a_session_with_a_prefiller_of_its_own_finds_its_prompt_there() -> None:
    workload = replace(SMALL, appends=False, prefiller_kv_tokens=500_000)
    anywhere, at_home = measure(workload, POWER_OF_TWO), measure(workload, rendezvous(4))
    assert at_home.appended == anywhere.appended == 0
    assert at_home.prefilled < 0.5 * anywhere.prefilled
    assert p95(at_home.first_tokens) < 0.7 * p95(anywhere.first_tokens)


def test_the_same_seed_gives_the_same_figures() -> None:
    runs: list[Result] = [measure(replace(SMALL, sessions=20), BOUND, seed=3) for _ in range(2)]
    assert runs[0] == runs[1]
