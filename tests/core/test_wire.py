"""A3: the router's mark."""

from typing import Any

import pytest

from schedloom.core.wire import LOCAL_ATTEMPT_KEY, PROTOCOL_VERSION, is_local_attempt


def test_the_mark_is_the_key_with_this_protocols_version() -> None:
    assert is_local_attempt({LOCAL_ATTEMPT_KEY: PROTOCOL_VERSION})


@pytest.mark.parametrize(
    "extra", [None, {}, {LOCAL_ATTEMPT_KEY: 0}, {LOCAL_ATTEMPT_KEY: PROTOCOL_VERSION + 1}, {"x": 1}]
)
def test_anything_else_is_no_mark(extra: dict[str, Any] | None) -> None:
    assert not is_local_attempt(extra)
