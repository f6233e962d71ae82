"""R6, R12: KV that a Prefiller writes while its Decoder waits, under every fault, on a simulated clock."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace

import pytest

from schedloom.core.wire import Role
from schedloom.router.laboratory.clock import simulate
from schedloom.router.laboratory.promises import wrongs_of
from tests.router.writing import Faults, LayerwiseEngine, Town

SEEDS = int(os.environ.get("SCHEDLOOM_SEEDS", "300")) // 2


def wrongs_of_town(town: Town) -> list[str]:
    wrongs = list(town.ledger.wrongs)
    wrongs += [f"{turn.label}: {wrong}" for turn in town.turns for wrong in wrongs_of(turn)]
    wrongs += [f"{label}: {n} dispatches" for label, n in town.ledger.dispatches.items() if n > 5]
    wrongs += [f"{worker.name} is still busy" for worker in town.app.fleet.workers if worker.in_flight]
    wrongs += [f"{engine.origin} was left with KV" for engine in town.engines if engine.leases]
    return wrongs + [f"{one}: a Decoder waits for ever" for one in waiting(town) if not was_given_up(town, one)]


def waiting(town: Town) -> set[str]:
    """Requests whose Decoder still keeps room for what a Prefiller would write."""
    return {request_id for engine in town.engines for request_id in engine.waiting} - town.ledger.excused


def was_given_up(town: Town, request_id: str) -> bool:
    """Whether the Prefiller that the Decoder waits for failed twice, or once with the last of what may be done or after
    it hung; or whether none was left when the Decoder asked.
    """
    if not any(request_id in ids for ids in town.ledger.prefills.values()):
        return all(math.isfinite(engine.stopped_until) for engine in town.engines if engine.role is Role.PRODUCER)
    label, asked = next((label, ids) for label, ids in town.ledger.prefills.items() if request_id in ids)
    was_all = town.ledger.dispatches[label] == 5
    return request_id not in town.ledger.computed and (
        asked.count(request_id) == 2 or was_all or request_id in town.ledger.hung
    )


@pytest.mark.parametrize("block", range(10))
def test_nothing_is_stranded_under_any_fault(block: int) -> None:
    for seed in range(block * SEEDS // 10, (block + 1) * SEEDS // 10):
        town = Town(seed)
        simulate(town.play())
        assert wrongs_of_town(town) == [], f"seed {seed}"


@pytest.mark.parametrize("block", range(5))
def test_no_decoder_that_asked_waits_for_ever(block: int) -> None:
    for seed in range(block * SEEDS // 10, (block + 1) * SEEDS // 10):
        town = Town(seed, calm(seed), LayerwiseEngine)
        simulate(town.play())
        assert wrongs_of_town(town) == [], f"seed {seed}"


def calm(seed: int) -> Faults:
    """Silence is left out: a Decoder that is given up for it cannot be told from one that is done with its prefill."""
    return replace(Faults.any(random.Random(seed)), hang=0.0, client_error=0.0)


def test_without_faults_everything_succeeds_and_nothing_needs_an_excuse() -> None:
    for seed in range(100):
        town = Town(seed, Faults())
        simulate(town.play())
        assert wrongs_of_town(town) == [], f"seed {seed}"
        assert {turn.received.status for turn in town.turns if not turn.left} == {200}
