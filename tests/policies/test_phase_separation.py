"""B11: how phases alternate, and how batches fit."""

from typing import Any

import pytest
from pydantic import ValidationError

from schedloom.core.decisions import Phase, Verdict
from schedloom.core.views import BatchReport, ReusableKV
from schedloom.policies.phase_separation import PhaseSeparation
from schedloom.policies.phase_separation.buckets import fitting_tokens
from schedloom.policies.phase_separation.policy import RETRY_STEPS
from tests.policies.fakes import FakeEngine, FakeRequest

BUCKETS = (256, 512, 1024)


def make(**settings: Any) -> PhaseSeparation:
    return PhaseSeparation(PhaseSeparation.Settings.model_validate(settings))


def phases(policy: PhaseSeparation, engine: FakeEngine, steps: int) -> str:
    return "".join(policy.plan_step(engine).phase.name[0] for _ in range(steps))


def test_alone_a_phase_has_every_step() -> None:
    assert phases(make(), FakeEngine(), 3) == "EEE"
    assert phases(make(), FakeEngine(num_decoding=4), 3) == "DDD"
    assert phases(make(), FakeEngine(num_prefilling=1), 3) == "PPP"


@pytest.mark.parametrize(("prefill", "decode", "order"), [(1, 1, "PDPDPDPD"), (2, 3, "PPDDDPPD"), (3, 1, "PPPDPPPD")])
def test_both_alternate_within_bounds(prefill: int, decode: int, order: str) -> None:
    policy = make(prefill_steps=prefill, decode_steps=decode)
    assert phases(policy, FakeEngine(num_decoding=4, num_prefilling=1), 8) == order


def test_prefill_in_which_nothing_fits_is_tried_rarely() -> None:
    policy = make()
    order = ""
    engine = FakeEngine(num_decoding=4)
    for _ in range(2 * RETRY_STEPS + 4):
        phase = policy.plan_step(engine).phase
        engine.last_batch = BatchReport(requests=4 * (phase is Phase.DECODE), left_out_prefill=True)
        order += phase.name[0]
    assert order == "DP" + RETRY_STEPS * "D" + "P" + RETRY_STEPS * "D" + "P"


def test_a_phase_in_which_nothing_fits_gives_way_at_once() -> None:
    policy = make(prefill_steps=9, decode_steps=9)
    engine = FakeEngine(num_decoding=1, num_prefilling=1, last_batch=BatchReport(requests=0))
    assert phases(policy, engine, 4) == "PDPD"


def test_a_step_in_which_prefill_is_put_off_is_no_try() -> None:
    policy, engine = make(), FakeEngine(num_decoding=1, num_prefilling=1)
    order = ""
    for step in range(12):
        engine.prefill_throttled = step % 3 > 0
        order += phases(policy, engine, 1)
    assert order == "PDD" * 4


def test_prefill_that_nobody_decodes_beside_is_not_put_off() -> None:
    assert phases(make(), FakeEngine(num_prefilling=1, prefill_throttled=True), 2) == "PP"


def test_in_a_decode_step_prefill_is_held_and_looked_up_once() -> None:
    policy, engine, request = make(), FakeEngine(num_decoding=4), FakeRequest(num_prompt_tokens=100)
    for _ in range(3):
        engine.last_batch = BatchReport()
        while policy.plan_step(engine).phase is not Phase.DECODE:
            assert policy.admit(request, engine) is None
        answer = policy.admit(request, engine)
        assert answer is not None
        assert answer.verdict is Verdict.HOLD
    assert engine.looked_up == ["r"]


@pytest.mark.parametrize("reusable", [ReusableKV(0, 100), ReusableKV(96, 3), ReusableKV(99, 0)])
def test_loaded_kv_counts_as_decode(reusable: ReusableKV) -> None:
    policy, engine = make(), FakeEngine(reusable, num_decoding=4)
    assert policy.plan_step(engine).phase is Phase.DECODE
    assert policy.admit(FakeRequest(num_prompt_tokens=100), engine) is None
    assert policy.plan_step(engine).phase is Phase.DECODE


@pytest.mark.parametrize(
    ("used", "tokens", "granted"),
    [
        (0, 100, 100),
        (0, 1024, 1024),
        (0, 4000, 1024),
        (1000, 4000, 24),
        (1024, 50, 0),
        (0, 1000, 1000),
        (0, 600, 512),
        (500, 100, 12),
        (512, 100, 100),
        (0, 500, 500),
    ],
)
def test_tokens_that_fit(used: int, tokens: int, granted: int) -> None:
    assert fitting_tokens(used, tokens, BUCKETS, 0.25) == granted


def test_a_batch_is_within_the_last_bucket() -> None:
    policy, engine = make(prefill_token_buckets=[1024, 256, 512], decode_batch_buckets=[16, 8]), FakeEngine()
    assert policy.plan_step(engine).max_decodes == 16
    assert [policy.limit_tokens(FakeRequest(), 700, engine) for _ in range(3)] == [512, 512, 0]
    policy.plan_step(engine)
    assert policy.limit_tokens(FakeRequest(), 700, engine) == 512


def test_buckets_smaller_than_a_block_are_left_to_vllm() -> None:
    assert make(prefill_token_buckets=[8]).limit_tokens(FakeRequest(), 700, FakeEngine(block_size=16)) is None


@pytest.mark.parametrize("settings", [{"prefill_steps": 0}, {"decode_batch_buckets": [0]}, {"max_padding": 2}])
def test_unfit_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        make(**settings)
