"""A5, A9: whose KV is worth saving."""

import pytest

from schedloom.core.decisions import Recovery
from schedloom.policies.offload_restore import OffloadRestore
from schedloom.policies.offload_restore.policy import OffloadRestoreSettings
from tests.policies.fakes import FakeRequest


@pytest.mark.parametrize(
    ("computed", "settings", "ways"),
    [
        (256, {}, (Recovery.OFFLOAD, Recovery.RECOMPUTE)),
        (255, {}, None),
        (1, {"min_saved_tokens": 1}, (Recovery.OFFLOAD, Recovery.RECOMPUTE)),
        (0, {"min_saved_tokens": 1}, None),
    ],
)
def test_a_request_with_enough_computed_tokens_is_saved(
    computed: int, settings: dict[str, int], ways: tuple[Recovery, ...] | None
) -> None:
    policy = OffloadRestore(OffloadRestoreSettings(**settings))
    assert policy.recover(FakeRequest(num_computed_tokens=computed)) == ways
