"""C1: whatever a policy does in a hook, or answers, the engine goes on as if it had not been asked."""

from collections.abc import Iterator
from typing import Any

import pytest

from schedloom.adapters.engine.hooks import HookCaller
from schedloom.core.composition import Hook, PolicySet
from schedloom.core.decisions import Admission, Phase, Recovery, StepPlan, Verdict


def raising_late() -> Iterator[Recovery]:
    yield Recovery.OFFLOAD
    raise RuntimeError


def caller(name: str, answer: Any) -> HookCaller:
    return HookCaller(PolicySet((), {name: (Hook("odd", lambda view: answer),)}), name)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("admit", Verdict.HOLD),
        ("admit", True),
        ("screen", "no"),
        ("queue_key", "short"),
        ("limit_tokens", 12.5),
        ("limit_tokens", True),
        ("recover", Recovery.OFFLOAD),
        ("recover", ["offload"]),
        ("recover", raising_late()),
        ("plan_step", Phase.PREFILL),
    ],
)
def test_what_is_no_answer_is_passed_over_and_counted(name: str, answer: Any) -> None:
    hook = caller(name, answer)
    assert list(hook.ask(None)) == []
    assert hook.counts.total() == 1 and next(iter(hook.counts))[2] == "FAILED"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("admit", Admission(Verdict.ADMIT)),
        ("limit_tokens", 0),
        ("recover", (Recovery.RETURN,)),
        ("plan_step", StepPlan(Phase.EITHER)),
        ("step_begin", None),
    ],
)
def test_answers_arrive(name: str, answer: Any) -> None:
    assert list(caller(name, answer).ask(None)) == ([] if answer is None else [("odd", answer)])
