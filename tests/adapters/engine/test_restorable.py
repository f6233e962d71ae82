"""A3, A6: tokens that a KV connector can restore count as reusable, and it is asked through its public interface."""

import pytest

from tests.adapters.engine.conftest import Make
from tests.adapters.engine.harness import make_request, tokens
from tests.adapters.engine.scenarios import REJECTED


class FakeAnswers:
    """Stands in for a connector's ``get_num_new_matched_tokens``."""

    def __init__(self, *answers: int | None) -> None:
        self.answers = list(answers)
        self.asked_with: list[int] = []

    def __call__(self, request: object, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.asked_with.append(num_computed_tokens)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer, False


@pytest.mark.parametrize(("restorable", "admitted"), [(288, True), (96, False), (0, False)])
def test_restorable_tokens_count(make: Make, restorable: int, admitted: bool) -> None:
    runner = make("append_prefill")
    runner.scheduler.connector.get_num_new_matched_tokens = FakeAnswers(restorable)
    runner.scheduler.add_request(make_request("attempt", tokens(2, 300), marked=True))
    runner.drain()
    assert runner.ended["attempt"] == (("length", None) if admitted else REJECTED)


def test_a_connector_that_still_looks_is_waited_for(make: Make) -> None:
    runner = make("append_prefill")
    runner.scheduler.connector.get_num_new_matched_tokens = FakeAnswers(*[None] * 12, 0)
    runner.scheduler.add_request(make_request("attempt", tokens(2, 300), marked=True))
    runner.steps(3)
    assert "attempt" not in runner.ended
    runner.drain()
    assert runner.ended["attempt"] == REJECTED
