"""F7: what policies see of an engine is of this step, and does not change within it by what they allow."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an engine: install schedloom[cpu]")

from vllm.v1.core.sched.scheduler import Scheduler

from schedloom import Policy, hookimpl
from schedloom.adapters.engine.scheduler import composed
from schedloom.adapters.engine.views import VllmEngineView, VllmRequestView
from schedloom.core.composition import PolicyChoice, compose
from tests.conformance.test_composition import These


def running(computed: int, tokens: int = 10) -> Any:
    return SimpleNamespace(is_prefill_chunk=computed < tokens, num_tokens=tokens, num_computed_tokens=computed)


def test_a_request_that_joins_in_the_middle_of_a_step_is_no_stream() -> None:
    scheduler = SimpleNamespace(running=[running(10)], _inflight_prefills={"somebody"})
    view = VllmEngineView(scheduler)
    view.begin_step(False)
    assert view.num_decoding == 1
    scheduler.running.append(SimpleNamespace(is_prefill_chunk=False, num_tokens=10, num_computed_tokens=0))
    assert view.num_decoding == 1


def test_the_last_token_of_a_prompt_alone_is_decode() -> None:
    view = VllmEngineView(SimpleNamespace(running=[running(9), running(8)], _inflight_prefills={"somebody"}))
    view.begin_step(False)
    assert (view.num_decoding, view.num_prefilling) == (1, 1)


@pytest.mark.parametrize("capacity_bound", [False, True])
def test_where_prefill_lacks_room_vllm_does_not_throttle_it(capacity_bound: bool) -> None:
    view = VllmEngineView(SimpleNamespace(prefill_capacity_bound=capacity_bound))
    view.begin_step(True)
    assert view.prefill_throttled is not capacity_bound
    view.begin_step(False)
    assert not view.prefill_throttled


@pytest.mark.parametrize(("restorable", "known"), [(0, (32, 0)), (100, (64, 100))])
def test_where_groups_of_a_cache_disagree_only_what_all_hold_is_resident(
    restorable: int, known: tuple[int, int]
) -> None:
    """Unless a connector restores the rest: it continues from the longest group's prefix."""
    scheduler = SimpleNamespace(
        block_size=16,
        look_up_local_prefix=lambda request: (None, 64, 0, True),
        kv_cache_manager=SimpleNamespace(get_computed_blocks=lambda request: (None, 35)),
        connector=SimpleNamespace(get_num_new_matched_tokens=lambda request, resident: (restorable, True)),
    )
    request = VllmRequestView(SimpleNamespace(skip_reading_prefix_cache=False))
    found = VllmEngineView(scheduler).reusable_kv(request)
    assert (found.resident, found.restorable) == known


class Counts(Policy):
    name = "counts"

    @hookimpl
    def admit(self) -> None:
        pass


def test_every_composition_looks_anew_in_every_step() -> None:
    begun: list[int] = []

    class Stock(Scheduler):
        waiting: Any = ()
        kv_cache_manager: Any = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=()))

        def __init__(self) -> None:
            pass

        def schedule(self, throttle_prefills: bool = False) -> Any:
            begun.append(1)
            return None

    scheduler = composed(Stock, compose([PolicyChoice(name="counts")], These(Counts)))()
    scheduler.view._num_prefilling = 7
    scheduler.schedule()
    assert begun and scheduler.view._num_prefilling is None
