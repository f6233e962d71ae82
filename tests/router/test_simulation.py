"""What holds under every fault, on a simulated clock and network."""

from __future__ import annotations

import json
import os

import pytest

from tests.router.simulation import CONTINUATIONS, WORDS, Faults, Town, Turn, simulate

SEEDS = int(os.environ.get("SCHEDLOOM_SEEDS", "300"))


CONTINUED = ("continued", "failed")


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
    if turn.stream and len({part["id"] for part in received.objects if "id" in part}) > 1:
        return ["one stream under several ids"]
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
    back = town.ledger.handed_back
    # A local attempt that is handed back without output may look as if it was turned away.
    wrongs += [f"{label}: handed back {n} times" for label, n in back.items() if n > CONTINUATIONS + 1]
    most = {label: 5 + 2 * back.get(label, 0) for label in town.ledger.dispatches}
    wrongs += [f"{label}: {n} dispatches" for label, n in town.ledger.dispatches.items() if n > most[label]]
    wrongs += [f"{worker.name} is still busy" for worker in town.app.fleet.workers if worker.in_flight]
    wrongs += [f"{engine.origin} was left with KV" for engine in town.engines if engine.leases]
    metrics = town.app.metrics.registry
    attempts = metrics.get_sample_value("schedloom_router_local_attempts_total") or 0
    results = [
        metrics.get_sample_value("schedloom_router_local_attempt_results_total", {"result": result}) or 0
        for result in ("hit", "rejected", "error")
    ]
    wrongs += [f"{attempts} attempts, but results {results}"] if attempts != sum(results) else []
    ends = [metrics.get_sample_value("schedloom_router_continuations_total", {"result": r}) for r in CONTINUED]
    handed_back = metrics.get_sample_value("schedloom_router_handed_back_total") or 0
    wrongs += [f"{handed_back} handed back, but {ends}"] if handed_back != sum(end or 0 for end in ends) else []
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
