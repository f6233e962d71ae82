"""A2, B1: a load tool of the field sees ordinary answers through the router, from real engines.

The tool is installed into an environment of its own at the first run, which takes minutes.
"""

from __future__ import annotations

import pytest

from benchmarks.aiperf import SESSIONS, TURNS, measure

pytestmark = [pytest.mark.engines, pytest.mark.deep, pytest.mark.timeout(1800)]


def test_aiperf_plays_sessions_of_several_turns() -> None:
    figures = measure(real=True)
    assert (figures["requests"], figures["errors"]) == (SESSIONS * TURNS, 0)
    assert figures["pd"] == SESSIONS
    assert figures["append"] == SESSIONS * (TURNS - 1)
