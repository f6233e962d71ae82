"""X2: decode latency stays inside a stated bound while prefill shares the steps."""

from dataclasses import dataclass
from typing import cast

from schedloom.core.decisions import StepOutcome
from schedloom.core.views import EngineView, RequestView
from schedloom.policies.tpot_guard import TpotGuard
from schedloom.policies.tpot_guard.policy import TpotGuardSettings

BOUND_MS = 50.0
DECODE_SECONDS = 0.020
SECONDS_PER_TOKEN = 0.001


@dataclass
class Engine:
    num_decoding: int = 8


def step(guard: TpotGuard, wanted: int, decoding: int = 8) -> tuple[int, float]:
    """One step of an engine with the costs above that wants to prefill ``wanted`` tokens: tokens and seconds."""
    guard.step_begin()
    view, request = cast(EngineView, Engine(decoding)), cast(RequestView, None)
    limit = guard.limit_tokens(request, wanted, view) if wanted else 0
    tokens = wanted if limit is None else limit
    seconds = DECODE_SECONDS + tokens * SECONDS_PER_TOKEN
    guard.step_end(StepOutcome(decoding, tokens, seconds))
    return tokens, seconds


def learned() -> TpotGuard:
    guard = TpotGuard(TpotGuardSettings(tpot_ms=BOUND_MS, min_chunk_tokens=8))
    for _ in range(20):
        step(guard, 0)
    return guard


def test_no_step_exceeds_the_bound_and_the_room_is_used() -> None:
    guard = learned()
    steps = [step(guard, 256) for _ in range(40)]
    assert all(seconds <= BOUND_MS / 1000 + 1e-9 for _, seconds in steps)
    assert [tokens for tokens, _ in steps[:3]] == [8, 16, 29]
    assert all(28 <= tokens <= 30 for tokens, _ in steps[3:])


def test_the_bound_is_found_even_when_no_step_is_without_prefill() -> None:
    guard = TpotGuard(TpotGuardSettings(tpot_ms=BOUND_MS, min_chunk_tokens=8))
    steps = [step(guard, 256) for _ in range(60)]
    assert all(seconds <= BOUND_MS / 1000 + 1e-9 for _, seconds in steps)
    assert all(28 <= tokens <= 30 for tokens, _ in steps[20:])


def test_without_streams_nothing_is_metered() -> None:
    assert step(learned(), 256, decoding=0)[0] == 256


def test_several_requests_share_one_steps_room() -> None:
    guard = learned()
    for _ in range(5):
        step(guard, 256)
    guard.step_begin()
    view, request = cast(EngineView, Engine()), cast(RequestView, None)
    granted = [guard.limit_tokens(request, 20, view) for _ in range(3)]
    assert sum(cast(list[int], granted)) <= 30
    assert granted[0] == 20


def test_prefill_goes_on_even_where_decodes_alone_exceed_the_bound() -> None:
    guard = TpotGuard(TpotGuardSettings(tpot_ms=5, min_chunk_tokens=8))
    for _ in range(20):
        step(guard, 0)
    assert [step(guard, 256)[0] for _ in range(10)] == [8] * 10


def test_the_cost_follows_the_engine() -> None:
    guard = learned()
    for _ in range(10):
        step(guard, 256)
    for _ in range(300):
        for tokens in (0, 8):
            guard.step_end(StepOutcome(8, tokens, 2 * (DECODE_SECONDS + tokens * SECONDS_PER_TOKEN)))
    assert guard.cost.tokens_within(BOUND_MS / 1000) == 5


def test_times_that_tell_nothing_do_not_open_the_gate() -> None:
    """On a busy machine a step with a large chunk may happen to take less time than one without."""
    guard = TpotGuard(TpotGuardSettings(tpot_ms=BOUND_MS, min_chunk_tokens=8))
    for _ in range(10):
        guard.step_end(StepOutcome(8, 0, 0.060))
        guard.step_end(StepOutcome(8, 200, 0.055))
    assert step(guard, 256)[0] == 8
