"""X1, C4: the seams of the installed vLLM, and how a changed one is told."""

from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from schedloom.adapters.engine import seams


@pytest.mark.parametrize("scheduler", [Scheduler, AsyncScheduler])
def test_the_installed_vllm_has_every_seam(scheduler: type) -> None:
    seams.check(scheduler)


def test_a_missing_seam_is_named() -> None:
    class Old:
        def add_request(self, request: Any) -> None: ...

    with pytest.raises(seams.SeamError, match=r"needs Old\.schedule\(throttle_prefills\), but it is missing"):
        seams.check(Old)


def test_a_changed_seam_is_named_with_both_signatures() -> None:
    class Changed(Scheduler):
        def finish_requests(self, ids: Any, why: Any) -> Any: ...

    expected = r"Changed\.finish_requests\(request_ids, finished_status\), but it takes \(ids, why\)"
    with pytest.raises(seams.SeamError, match=expected):
        seams.check(Changed)


def test_a_new_parameter_is_refused_unless_it_is_known() -> None:
    class Changed(Scheduler):
        def _get_local_prefix_cache_hit(self, request: Any, unknown: int = 0) -> Any: ...

    with pytest.raises(seams.SeamError, match="max_cache_hit_length"):
        seams.check(Changed)
