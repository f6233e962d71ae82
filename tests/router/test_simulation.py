"""What holds under every fault, on a simulated clock and network."""

from __future__ import annotations

import json
import os

import pytest

from tests.router.simulation import WORDS, Faults, Town, Turn, simulate

SEEDS = int(os.environ.get("SCHEDLOOM_SEEDS", "300"))


def wrongs_of(turn: Turn) -> list[str]:
    """What the client of one turn would complain about."""
    received = turn.received
    if turn.left and not received.ended:
        return []
    if not received.ended:
        return ["the answer has no end"]
    if b"schedloom" in received.body:
        return ["a rejection reached the client"]
    if received.status != 200:
        return [] if "error" in json.loads(received.body) else ["an error without a message"]
    words, failed = _words(turn)
    answers = {word.split(".")[0] for word in words}
    if len(answers) > 1 or [word.split(".")[1] for word in words] != [str(n) for n in range(len(words))]:
        return [f"output was mixed or replayed: {words}"]
    return [] if failed or len(words) == WORDS else [f"a short answer looks complete: {words}"]


def _words(turn: Turn) -> tuple[list[str], bool]:
    if not turn.stream:
        return turn.received.text.split(), False
    events = turn.received.events
    failed = any("error" in json.loads(event) for event in events if event != "[DONE]")
    assert failed != (events[-1] == "[DONE]"), events
    text = "".join(
        choice["text"] for event in events if event != "[DONE]" for choice in json.loads(event).get("choices", [])
    )
    return text.split(), failed


def wrongs_of_town(town: Town) -> list[str]:
    wrongs = list(town.ledger.wrongs)
    wrongs += [f"{turn.label}: {wrong}" for turn in town.turns for wrong in wrongs_of(turn)]
    wrongs += [f"{label}: {n} dispatches" for label, n in town.ledger.dispatches.items() if n > 5]
    wrongs += [f"{worker.name} is still busy" for worker in town.app.fleet.workers if worker.in_flight]
    wrongs += [f"{engine.origin} was left with KV" for engine in town.engines if engine.leases]
    metrics = town.app.metrics.registry
    attempts = metrics.get_sample_value("schedloom_router_local_attempts_total") or 0
    results = [
        metrics.get_sample_value("schedloom_router_local_attempt_results_total", {"result": result}) or 0
        for result in ("hit", "rejected", "error")
    ]
    wrongs += [f"{attempts} attempts, but results {results}"] if attempts != sum(results) else []
    wrongs += ["the gate still counts somebody"] if town.app.door.gate.inside else []
    return wrongs


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


def test_without_faults_everything_succeeds() -> None:
    for seed in range(100):
        town = Town(seed, Faults())
        simulate(town.play())
        assert wrongs_of_town(town) == []
        statuses = {turn.received.status for turn in town.turns if not turn.left}
        assert statuses == {200}


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
