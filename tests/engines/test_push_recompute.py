"""A5, B3, B4: what a real Decoder hands back is continued where KV is written instead of pulled, token for token.

Completions only: the router has no chat handed back there, because its continuation would wait under another id.
"""

from collections.abc import Iterator

import pytest

from tests.engines.fleets import metric
from tests.engines.test_recompute import AT_ONCE, COMPLETIONS, Asked, System, go_on_exactly, request, running

pytestmark = [pytest.mark.engines, pytest.mark.deep, pytest.mark.timeout(1800)]

HAND_BACKS, WAVES = 4, 12


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running("v1", tmp_path_factory.mktemp("push"), "NixlPushConnector") as system:
        yield system


def completions(wave: int) -> list[Asked]:
    """Streamed and not, each with a prompt of its own."""
    asked = map(request, range(2 * wave * AT_ONCE, 2 * (wave + 1) * AT_ONCE))
    return [one for one in asked if one.path == COMPLETIONS]


def test_what_is_handed_back_goes_on_exactly(system: System) -> None:
    served = go_on_exactly(system, map(completions, range(WAVES)), HAND_BACKS)
    assert (
        metric(system.decoder, "vllm:kv_cache_usage_perc") == metric(system.prefiller, "vllm:kv_cache_usage_perc") == 0
    )
    assert metric(system.prefiller, "vllm:nixl_bytes_transferred_count") >= served, "the Prefiller wrote every prompt"
