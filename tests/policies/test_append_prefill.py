"""A3: append-prefill decides on the KV that is there."""

from dataclasses import dataclass

import pytest

from schedloom.core.decisions import Verdict
from schedloom.core.views import RequestView, ReusableKV
from schedloom.policies.append_prefill import AppendPrefill


@dataclass
class Request:
    request_id: str = "r"
    num_prompt_tokens: int = 4000
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    is_local_attempt: bool = True


@dataclass
class Engine:
    reusable: ReusableKV
    block_size: int = 16
    num_decoding: int = 0
    asked: int = 0

    def reusable_kv(self, request: RequestView) -> ReusableKV:
        self.asked += 1
        return self.reusable


@pytest.mark.parametrize("hook", ["admit", "screen"])
@pytest.mark.parametrize(
    ("resident", "verdict", "reason"),
    [(3_968, Verdict.ADMIT, "usable_prefix"), (0, Verdict.REJECT, "no_usable_prefix")],
)
def test_verdict_and_its_numbers(hook: str, resident: int, verdict: Verdict, reason: str) -> None:
    answer = getattr(AppendPrefill(), hook)(Request(), Engine(ReusableKV(resident, 0)))
    assert (answer.verdict, answer.reason) == (verdict, reason)
    assert answer.facts == {"prompt_tokens": 4000, "resident_tokens": resident, "restorable_tokens": 0}


def test_an_unmarked_request_is_not_even_looked_up() -> None:
    engine = Engine(ReusableKV(0, 0))
    assert AppendPrefill().admit(Request(is_local_attempt=False), engine) is None
    assert engine.asked == 0
