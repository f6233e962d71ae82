"""A6: which requests are worth a way through the router."""

import pytest

from schedloom.core.decisions import Recovery
from schedloom.policies.recompute import Recompute
from schedloom.policies.recompute.policy import RecomputeSettings
from tests.policies.fakes import FakeRequest

WAYS = (Recovery.RETURN, Recovery.RECOMPUTE)


@pytest.mark.parametrize(
    ("computed", "settings", "ways"),
    [
        (512, {}, WAYS),
        (511, {}, None),
        (1, {"min_returned_tokens": 1}, WAYS),
        (0, {"min_returned_tokens": 1}, None),
    ],
)
def test_a_request_with_enough_computed_tokens_goes_back(
    computed: int, settings: dict[str, int], ways: tuple[Recovery, ...] | None
) -> None:
    policy = Recompute(RecomputeSettings(**settings))
    assert policy.recover(FakeRequest(num_computed_tokens=computed)) == ways


def test_it_runs_on_decoders_and_continues_what_others_hand_back() -> None:
    assert Recompute.requires.decoder
    assert Recompute.hands_back
