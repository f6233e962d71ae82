"""A3: the usable prefix."""

import pytest

from schedloom.core.reuse import UsablePrefixRule
from schedloom.core.views import ReusableKV

RULE = UsablePrefixRule(min_reused_tokens=128, max_append_tokens=2048)


@pytest.mark.parametrize(
    ("prompt", "resident", "restorable", "hopeless"),
    [
        (12_288, 12_000, 0, False),
        (12_288, 0, 12_000, False),
        (12_288, 6_000, 6_000, False),
        (12_288, 1_024, 0, True),  # a first prompt that shares only a system prompt
        (12_288, 10_240, 0, False),  # exactly max_append_tokens left
        (12_288, 10_239, 0, True),
        (200, 128, 0, False),  # exactly min_reused_tokens
        (200, 127, 0, True),
        (200, 0, 0, True),
        (12_288, 0, None, False),  # the connector is still looking
        (12_288, 12_000, None, False),
    ],
)
def test_hopeless(prompt: int, resident: int, restorable: int | None, hopeless: bool) -> None:
    assert RULE.is_hopeless(prompt, ReusableKV(resident, restorable)) is hopeless
