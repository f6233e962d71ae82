"""What holds under every fault, on a simulated clock and network."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from schedloom.router.laboratory.clock import simulate
from schedloom.router.laboratory.engines import Faults
from schedloom.router.laboratory.promises import wrongs_of_town
from schedloom.router.laboratory.town import Town

SEEDS = int(os.environ.get("SCHEDLOOM_SEEDS", "300"))


@pytest.mark.parametrize("block", range(10))
def test_nothing_goes_wrong_under_any_fault(block: int) -> None:
    routes: set[str] = set()
    for seed in range(block * SEEDS // 10, (block + 1) * SEEDS // 10):
        town = Town(seed)
        simulate(town.play())
        assert wrongs_of_town(town) == [], f"seed {seed}"
        routes |= {turn.received.headers.get("x-schedloom-decision", "none") for turn in town.turns}
    assert routes >= {"pd", "append", "fallback"}


STRATEGIES = [
    *(["prefix_aware", spread, "ttft_slo"] for spread in ("least_tokens", "power_of_two", "round_robin")),
    ["prefill_cost", "ttft_slo"],
    ["power_of_two", "rendezvous", "ttft_slo"],
]


@pytest.mark.parametrize("strategies", STRATEGIES, ids="+".join)
def test_nothing_goes_wrong_with_every_strategy_on(strategies: list[str]) -> None:
    routes: set[str] = set()
    for seed in range(SEEDS // 4):
        town = Town(seed, policies=strategies)
        simulate(town.play())
        assert wrongs_of_town(town) == [], f"seed {seed}"
        errors = [town.app.metrics.policy_errors.labels(name)._value.get() for name in strategies]
        assert errors == [0] * len(errors)
        routes |= {turn.received.headers.get("x-schedloom-decision", "none") for turn in town.turns}
    assert routes >= {"pd", "append", "fallback"}


def test_whoever_waits_for_an_engine_that_stops_is_served_by_another() -> None:
    """Each takes 75 seconds here, three looks that are not answered; to wait for one takes 600."""
    statuses: Counter[int] = Counter()
    for seed in range(SEEDS // 4):
        town = Town(seed, Faults(stop=0.15), healthy=1)
        simulate(town.play())
        assert wrongs_of_town(town) == [], f"seed {seed}"
        stayed = [turn for turn in town.turns if not turn.left]
        statuses.update(turn.received.status for turn in stayed)
        assert max(turn.seconds for turn in stayed if not turn.stream) < 250, f"seed {seed}"
    assert statuses[200] >= 0.999 * statuses.total()


def test_without_faults_everything_succeeds() -> None:
    for seed in range(100):
        town = Town(seed, Faults())
        simulate(town.play())
        assert wrongs_of_town(town) == []
        statuses = {turn.received.status for turn in town.turns if not turn.left}
        assert statuses == {200}


def test_requests_that_are_handed_back_all_succeed() -> None:
    handed_back = continued = 0
    for seed in range(100):
        town = Town(seed, Faults(hand_back=0.6))
        simulate(town.play())
        assert wrongs_of_town(town) == [], f"seed {seed}"
        stayed = [turn for turn in town.turns if not turn.left]
        assert {turn.received.status for turn in stayed} == {200}
        assert not any(b'"error"' in turn.received.body for turn in stayed)
        handed_back += sum(town.ledger.handed_back.values())
        continued += town.app.metrics.continuations.labels("continued")._value.get()
    assert handed_back > 500 and continued > 0.7 * handed_back


def test_the_same_seed_gives_the_same_history() -> None:
    histories = []
    for _ in range(2):
        town = Town(7)
        simulate(town.play())
        histories.append(
            [
                (turn.label, turn.received.status, turn.received.text if turn.received.status == 200 else "")
                for turn in town.turns
            ]
        )
    assert histories[0] == histories[1]
