"""A2: follow-up turns go to the Decoder instance and rank that served the turn before."""

from dataclasses import dataclass, field, replace

import pytest

from schedloom.core.routing import Attempt, Route, RouteRequest, SessionOwner
from schedloom.core.wire import EngineContract, Role
from schedloom.policies.session_owner import SessionOwnerRouting
from schedloom.policies.session_owner.policy import SessionOwnerSettings
from tests.policies.routing import FakeCandidate, asked


@dataclass
class Worker:
    name: str
    contract: EngineContract
    in_flight: int = 0
    load: float = 0.0
    targets: list[FakeCandidate] = field(default_factory=list)


def decoder(name: str, epoch: str) -> Worker:
    return Worker(name, EngineContract(role=Role.CONSUMER, models=["m"], block_size=16, epoch=epoch))


@dataclass
class Fleet:
    decoders: list[Worker] = field(default_factory=lambda: [decoder("d0", "first"), decoder("d1", "first")])
    prefillers: list[Worker] = field(default_factory=list)


REQUEST, WHOLE = (asked(session="session", body_bytes=1000, splittable=splittable) for splittable in (True, False))
OWNER = SessionOwner("d1", "first", rank=3)


def plan(request: RouteRequest, owner: SessionOwner | None) -> list[Attempt] | None:
    return SessionOwnerRouting().plan_route(request, owner, Fleet())


def test_the_owner_and_its_rank_are_tried_first() -> None:
    assert plan(REQUEST, OWNER) == [Attempt(Route.APPEND, worker="d1", rank=3)]


def test_no_attempt_where_the_decoder_cannot_turn_it_away_now() -> None:
    fleet = Fleet()
    fleet.decoders[1].contract = fleet.decoders[1].contract.model_copy(update={"inactive": ["append_prefill"]})
    assert SessionOwnerRouting().plan_route(REQUEST, OWNER, fleet) is None


@pytest.mark.parametrize(
    ("request_", "owner"),
    [
        (REQUEST, None),
        (REQUEST, replace(OWNER, worker="gone")),
        (REQUEST, replace(OWNER, epoch="before its restart")),
    ],
)
def test_no_attempt_without_a_living_owner(request_: RouteRequest, owner: SessionOwner | None) -> None:
    assert plan(request_, owner) is None


def test_what_cannot_be_split_goes_to_the_owner_as_a_whole() -> None:
    assert plan(WHOLE, OWNER) == [Attempt(Route.DECODE, worker="d1", rank=3)]


@pytest.mark.parametrize(("load", "kept"), [(5.0, True), (5.5, False)])
def test_an_owner_keeps_its_session_up_to_a_stated_imbalance(load: float, kept: bool) -> None:
    fleet = Fleet()
    fleet.decoders[0].load, fleet.decoders[1].load = 3.0, load
    policy = SessionOwnerRouting(SessionOwnerSettings(max_lead=2))
    for request in (REQUEST, WHOLE):
        assert (policy.plan_route(request, OWNER, fleet) is not None) is kept
