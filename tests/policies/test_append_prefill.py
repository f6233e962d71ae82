"""A3: append-prefill decides on the KV that is there."""

import pytest

from schedloom.core.decisions import Verdict
from schedloom.core.views import ReusableKV
from schedloom.policies.append_prefill import AppendPrefill
from tests.policies.fakes import FakeEngine, FakeRequest


@pytest.mark.parametrize("hook", ["admit", "screen"])
@pytest.mark.parametrize(
    ("resident", "verdict", "reason"),
    [(3_968, Verdict.ADMIT, "usable_prefix"), (0, Verdict.REJECT, "no_usable_prefix")],
)
def test_verdict_and_its_numbers(hook: str, resident: int, verdict: Verdict, reason: str) -> None:
    answer = getattr(AppendPrefill(), hook)(FakeRequest(is_local_attempt=True), FakeEngine(ReusableKV(resident, 0)))
    assert (answer.verdict, answer.reason) == (verdict, reason)
    assert answer.facts == {"prompt_tokens": 4000, "resident_tokens": resident, "restorable_tokens": 0}


def test_an_unmarked_request_is_not_even_looked_up() -> None:
    engine = FakeEngine()
    assert AppendPrefill().admit(FakeRequest(), engine) is None
    assert engine.looked_up == []
