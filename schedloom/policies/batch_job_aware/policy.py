"""Let batch jobs use what interactive requests leave over."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schedloom.core.decisions import Admission, Lane, Verdict
from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy, PolicySettings
from schedloom.core.views import EngineView, RequestView


class BatchJobAwareSettings(PolicySettings):
    """Which requests are batch jobs, and what they may take."""

    job_classes: Annotated[frozenset[str], Field(min_length=1)] = frozenset({"batch"})
    """Values of ``job_class`` in a request's ``vllm_xargs`` that make it a batch job."""

    max_active: Annotated[int, Field(ge=1)] = 8
    """Batch jobs that may hold KV at once."""

    max_wait_seconds: Annotated[float, Field(ge=0)] = 300.0
    """A batch job goes before every interactive request that arrives this much later, or more."""


class BatchJobAware(Policy):
    """Batch jobs wait in a lane of their own, and a few of them run at once."""

    name = "batch_job_aware"
    Settings = BatchJobAwareSettings
    conformance_settings = BatchJobAwareSettings(max_active=2, max_wait_seconds=20)
    conformance_never_rejects = True
    settings: BatchJobAwareSettings

    @hookimpl
    def queue_key(self, request: RequestView) -> Lane | None:
        return Lane("batch", self.settings.max_wait_seconds) if self._is_batch(request) else None

    @hookimpl
    def admit(self, request: RequestView, view: EngineView) -> Admission | None:
        if not self._is_batch(request) or view.num_active(self.settings.job_classes) < self.settings.max_active:
            return None
        return Admission(Verdict.DEFER, "batch_jobs_at_bound", whole_lane=True)

    def _is_batch(self, request: RequestView) -> bool:
        return request.job_class in self.settings.job_classes
