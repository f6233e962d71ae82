"""A5, B3, B4: what a real Decoder hands back is continued where KV is written instead of pulled, token for token.

Completions only: the router has no chat handed back there, because its continuation would wait under another id.
"""

import asyncio
from collections.abc import Iterator

import pytest

from tests.engines.fleets import metric
from tests.engines.test_recompute import (
    AT_ONCE,
    CHAT,
    COMPLETIONS,
    Asked,
    System,
    ask_all,
    go_on_exactly,
    proven_chains,
    request,
    running,
)

pytestmark = [pytest.mark.engines, pytest.mark.deep, pytest.mark.timeout(1800)]

HAND_BACKS, WAVES, WAVES_OF_CHATS = 4, 12, 2


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running("v1", tmp_path_factory.mktemp("push"), "NixlPushConnector") as system:
        yield system


def wave_of(path: str, wave: int) -> list[Asked]:
    """Streamed and not, each with a prompt of its own."""
    asked = map(request, range(2 * wave * AT_ONCE, 2 * (wave + 1) * AT_ONCE))
    return [one for one in asked if one.path == path]


def test_what_is_handed_back_goes_on_exactly(system: System) -> None:
    served = go_on_exactly(system, (wave_of(COMPLETIONS, wave) for wave in range(WAVES)), HAND_BACKS)
    assert nobody_keeps_kv(system)
    assert metric(system.prefiller, "vllm:nixl_bytes_transferred_count") >= served, "the Prefiller wrote every prompt"


@pytest.mark.timeout(300)
def test_chats_are_preempted_and_never_handed_back(system: System) -> None:
    """Under the same pressure, and with the same policy. One that is handed back would wait for ever."""
    handed_back, recomputed = proven_chains(system), recomputations(system)
    for wave in range(WAVES, WAVES + WAVES_OF_CHATS):
        chats = wave_of(CHAT, wave)
        told = asyncio.run(ask_all(system.router, chats))
        assert [one.answer for one in told] == system.undisturbed(chats)
    assert recomputations(system) >= recomputed + WAVES_OF_CHATS
    assert proven_chains(system) == handed_back
    assert nobody_keeps_kv(system)


def recomputations(system: System) -> int:
    """How often the policy was asked about a preempted request and left it to the Decoder."""
    return sum(count for (what, _), count in system.decided().items() if what == "RECOMPUTE")


def nobody_keeps_kv(system: System) -> bool:
    return all(metric(engine, "vllm:kv_cache_usage_perc") == 0 for engine in (system.decoder, system.prefiller))
