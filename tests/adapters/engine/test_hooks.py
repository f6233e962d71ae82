"""C1: whatever a policy does in a hook, or answers, the engine goes on as if it had not been asked."""

from collections.abc import Iterator
from typing import Any

import pytest

from schedloom.adapters.engine.hooks import HookCaller
from schedloom.core.composition import Hook, PolicySet
from schedloom.core.decisions import Admission, Lane, Phase, Recovery, StepPlan, Verdict


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
        ("limit_tokens", -1),
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
    ("name", "kind", "arguments"),
    [
        ("admit", Admission, (3, "x")),
        ("admit", Admission, ("HOLD", "x")),
        ("admit", Admission, (Verdict.DEFER, ["x"])),
        ("admit", Admission, (Verdict.REJECT, 5)),
        ("admit", Admission, (Verdict.ADMIT, "half a \ud800")),
        ("screen", Admission, (Verdict.HOLD,)),
        ("admit", Admission, (Verdict.ADMIT, "x", None)),
        ("admit", Admission, (Verdict.ADMIT, "x", {"what": object()})),
        ("queue_key", Lane, (["x"],)),
        ("queue_key", Lane, ("x", float("inf"))),
        ("plan_step", StepPlan, ("decode",)),
        ("plan_step", StepPlan, (Phase.EITHER, "4")),
        ("plan_step", StepPlan, (Phase.EITHER, 0)),
        ("plan_step", StepPlan, (Phase.EITHER, True)),
    ],
)
def test_an_answer_that_no_engine_could_act_on_is_no_answer(name: str, kind: type, arguments: tuple[Any, ...]) -> None:
    hook = HookCaller(PolicySet((), {name: (Hook("odd", lambda view: kind(*arguments)),)}), name)
    for mode in ("on", "shadow"):
        hook.set_modes({"odd": mode})
        assert list(hook.ask(None)) == []
    assert [key[2] for key in hook.counts.elements()] == ["FAILED", "FAILED"]


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
