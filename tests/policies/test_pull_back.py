"""B9: when a turn goes over a Prefiller that pulls from the session's Decoder."""

from dataclasses import replace

import pytest

from schedloom.core.routing import Attempt, Route, RouteRequest, SessionOwner
from schedloom.core.wire import EngineContract, Role
from schedloom.policies.pull_back import PullBackRouting
from schedloom.policies.pull_back.policy import PullBackSettings
from tests.policies.test_session_owner import OWNER, REQUEST, WHOLE, Fleet, Worker


def fleet(both_ways: bool = True) -> Fleet:
    contract = EngineContract(
        role=Role.CONSUMER, models=["m"], block_size=16, epoch="first", bidirectional_kv=both_ways
    )
    return Fleet([Worker("d0", contract), Worker("d1", contract)])


def test_the_owner_is_the_decoder_and_the_cost_is_as_set() -> None:
    policy = PullBackRouting(PullBackSettings(expected_cost=0.5))
    assert policy.plan_route(REQUEST, OWNER, fleet()) == [
        Attempt(Route.PULL_BACK, worker="d1", rank=3, expected_cost=0.5)
    ]


@pytest.mark.parametrize(
    ("request_", "owner", "both_ways"),
    [
        (REQUEST, None, True),
        (REQUEST, OWNER, False),
        (REQUEST, replace(OWNER, worker="gone"), True),
        (REQUEST, replace(OWNER, epoch="before its restart"), True),
        (WHOLE, OWNER, True),
    ],
)
def test_there_is_nothing_to_pull(request_: RouteRequest, owner: SessionOwner | None, both_ways: bool) -> None:
    assert PullBackRouting().plan_route(request_, owner, fleet(both_ways)) is None
