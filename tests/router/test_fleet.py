from __future__ import annotations

from typing import Any

import pytest

from schedloom.core.routing import SessionOwner
from schedloom.core.wire import Role
from schedloom.router.failures import Failure
from schedloom.router.fleet.fleet import Fleet, build_fleet
from schedloom.router.fleet.roster import Roster
from schedloom.router.fleet.worker import Health, Worker
from schedloom.router.settings import WorkerSettings
from tests.router.fakes import contract


def worker(name: str, role: Role = Role.CONSUMER, configured: Any = None, **changes: Any) -> Worker:
    one = Worker(name, WorkerSettings(url=f"http://{name}:1", role=configured))
    one.join(contract(role, **changes))
    return one


def test_workers_are_named_for_their_role_and_place() -> None:
    roles: list[Any] = ["prefill", "decode", "decode", None]
    fleet = build_fleet(Roster([WorkerSettings(url=f"http://h{i}:1", role=role) for i, role in enumerate(roles)]))
    assert [one.name for one in fleet.workers] == ["prefiller-0", "decoder-0", "decoder-1", "engine-0"]


def test_the_least_busy_is_chosen_and_equals_take_turns() -> None:
    fleet = Fleet([worker("a"), worker("b"), worker("c")])
    a, b, c = fleet.workers
    with a.serving(0), c.serving(0), c.serving(0):
        assert {fleet.choose_decoder().name for _ in range(6)} == {"b"}
        with b.serving(0):
            assert sorted(fleet.choose_decoder().name for _ in range(6)) != ["a"] * 6
    assert sorted(fleet.choose_decoder().name for _ in range(6)) == list("aabbcc")


def test_busyness_is_per_rank() -> None:
    fleet = Fleet([worker("one"), worker("four", data_parallel_size=4)])
    one, four = fleet.workers
    with four.serving(0), four.serving(1), four.serving(2), one.serving(0):
        assert fleet.choose_decoder() is four
        assert four.least_busy_rank() == 3
    assert sorted(four.least_busy_rank() for _ in range(8)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_count_returns_to_zero_whatever_happens() -> None:
    one = worker("a", data_parallel_size=2)
    with pytest.raises(ValueError), one.serving(1):
        assert one.busy == [0, 1]
        raise ValueError
    assert one.busy == [0, 0]


def test_a_suspect_is_taken_only_when_nobody_else_is_there() -> None:
    fleet = Fleet([worker("a"), worker("b")])
    a, b = fleet.workers
    a.suspect()
    with b.serving(0), b.serving(0):
        assert fleet.choose_decoder() is b
    assert [one.name for one in fleet.decoders] == ["b"]
    b.leave(Health.DOWN, "gone")
    assert fleet.choose_decoder() is a
    a.leave(Health.QUARANTINED, "does not fit")
    with pytest.raises(Failure) as refused:
        fleet.choose_decoder()
    assert refused.value.status == 503


def test_roles_come_from_the_engine_and_are_narrowed_by_configuration() -> None:
    both = worker("both", Role.BOTH)
    assert (both.can_prefill, both.can_decode) == (True, True)
    narrowed = worker("narrowed", Role.BOTH, configured="prefill")
    assert (narrowed.can_prefill, narrowed.can_decode) == (True, False)
    assert not worker("consumer").can_prefill


@pytest.mark.parametrize(
    ("owner", "here"),
    [
        (SessionOwner("a", "e1", 1), True),
        (SessionOwner("a", "e0", 1), False),
        (SessionOwner("a", "e1", 2), False),
        (SessionOwner("b", "e1", 0), False),
    ],
)
def test_an_owner_is_an_instance_in_one_life(owner: SessionOwner, here: bool) -> None:
    fleet = Fleet([worker("a", data_parallel_size=2)])
    assert fleet.owner_is_here(owner) is here
    fleet.workers[0].suspect()
    assert not fleet.owner_is_here(owner)


def test_a_shrunken_engine_keeps_the_count_of_what_still_unwinds() -> None:
    one = worker("a", data_parallel_size=4)
    with one.serving(3):
        one.join(contract(Role.CONSUMER, epoch="e2", data_parallel_size=1))
        assert one.least_busy_rank() == 0
    assert one.in_flight == 0
