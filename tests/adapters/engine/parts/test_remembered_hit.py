"""A3: the look-up of an admission is vLLM's own look-up too, but never one that vLLM wants shorter.

Newer versions of vLLM pass a limit. ``Later`` is a fake with their signature, so that the guard is tested on every
version; the last test asks the real scheduler where it has the parameter.
"""

import inspect
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from schedloom.adapters.engine.parts.admission import AdmissionPart
from schedloom.adapters.engine.views import VllmEngineView, VllmRequestView
from tests.adapters.engine.conftest import Make
from tests.adapters.engine.harness import BLOCK, make_request, tokens
from tests.adapters.engine.scenarios import warm_up

LIMIT = "max_cache_hit_length"


class Later:
    """A fake scheduler that finds 640 tokens, or as many as it may."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []

    def _get_local_prefix_cache_hit(self, request: Any, max_cache_hit_length: int | None = None) -> Any:
        self.asked.append(max_cache_hit_length)
        return "blocks", min(640, max_cache_hit_length or 640), 0, False


class Limited(AdmissionPart, Later):
    def __init__(self) -> None:
        Later.__init__(self)
        self.view = VllmEngineView(self)


@pytest.fixture
def scheduler() -> Any:
    """One that has just looked at the request "r" for a policy."""
    scheduler: Any = Limited()
    scheduler.view._local_hit("r")
    return scheduler


@pytest.mark.parametrize("limits", [{}, {LIMIT: None}], ids=["without", "none"])
def test_one_look_up_serves_both(scheduler: Any, limits: dict[str, Any]) -> None:
    assert scheduler._get_local_prefix_cache_hit("r", **limits)[1] == 640
    assert scheduler.asked == [None]


def test_a_limited_look_up_is_made(scheduler: Any) -> None:
    assert scheduler._get_local_prefix_cache_hit("r", max_cache_hit_length=64)[1] == 64
    assert scheduler._get_local_prefix_cache_hit("r", 32)[1] == 32
    assert scheduler.asked == [None, 64, 32]


def test_nothing_is_remembered_beyond_a_limited_look_up(scheduler: Any) -> None:
    scheduler._get_local_prefix_cache_hit("r", max_cache_hit_length=64)
    scheduler._get_local_prefix_cache_hit("r")
    assert scheduler.asked == [None, 64, None]


def test_another_request_is_looked_up(scheduler: Any) -> None:
    scheduler._get_local_prefix_cache_hit("s")
    assert scheduler.asked == [None, None]


@pytest.mark.skipif(
    LIMIT not in inspect.signature(Scheduler._get_local_prefix_cache_hit).parameters,
    reason=f"this vLLM has no {LIMIT}",
)
def test_a_real_scheduler_limits_what_was_remembered(make: Make) -> None:
    runner = make("append_prefill")
    request = make_request("again", warm_up(runner) + tokens(3, 20), marked=True)
    view = runner.scheduler.view
    assert view.reusable_kv(VllmRequestView(request)).resident > 2 * BLOCK
    assert runner.scheduler._get_local_prefix_cache_hit(request, max_cache_hit_length=2 * BLOCK)[1] == 2 * BLOCK
