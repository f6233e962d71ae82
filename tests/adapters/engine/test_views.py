"""F7: what policies see of an engine is of this step, and does not change within it by what they allow."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an engine: install schedloom[cpu]")

from vllm.v1.core.sched.scheduler import Scheduler

from schedloom import Policy, hookimpl
from schedloom.adapters.engine.scheduler import composed
from schedloom.adapters.engine.views import VllmEngineView
from schedloom.core.composition import PolicyChoice, compose
from tests.conformance.test_composition import These


def running(computed: int, tokens: int = 10) -> Any:
    return SimpleNamespace(is_prefill_chunk=computed < tokens, num_tokens=tokens, num_computed_tokens=computed)


def test_a_request_that_joins_in_the_middle_of_a_step_is_no_stream() -> None:
    scheduler = SimpleNamespace(running=[running(10)], _inflight_prefills={"somebody"})
    view = VllmEngineView(scheduler)
    view.begin_step()
    assert view.num_decoding == 1
    scheduler.running.append(SimpleNamespace(is_prefill_chunk=False, num_tokens=10, num_computed_tokens=0))
    assert view.num_decoding == 1


def test_the_last_token_of_a_prompt_alone_is_decode() -> None:
    view = VllmEngineView(SimpleNamespace(running=[running(9), running(8)], _inflight_prefills={"somebody"}))
    view.begin_step()
    assert (view.num_decoding, view.num_prefilling) == (1, 1)


class Counts(Policy):
    name = "counts"

    @hookimpl
    def admit(self) -> None:
        pass


def test_every_composition_looks_anew_in_every_step() -> None:
    begun: list[int] = []

    class Stock(Scheduler):
        waiting: Any = ()

        def __init__(self) -> None:
            pass

        def schedule(self, throttle_prefills: bool = False) -> Any:
            begun.append(1)
            return None

    scheduler = composed(Stock, compose([PolicyChoice(name="counts")], These(Counts)))()
    scheduler.view._num_prefilling = 7
    scheduler.schedule()
    assert begun and scheduler.view._num_prefilling is None
