"""Save the KV of a preempted request and restore it, where that is cheaper than computing it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from schedloom.core.decisions import Recovery
from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy, PolicySettings, Requirements
from schedloom.core.views import RequestView

WAYS = (Recovery.OFFLOAD, Recovery.RECOMPUTE)


class OffloadRestoreSettings(PolicySettings):
    """When a save is worth its while."""

    min_saved_tokens: Annotated[int, Field(ge=1)] = 256
    """A request with fewer computed tokens is left to vLLM, which computes them again."""


class OffloadRestore(Policy):
    """Host memory first; vLLM's own way when that is full or cannot hold the request's KV exactly."""

    name = "offload_restore"
    Settings = OffloadRestoreSettings
    requires = Requirements(preempted_kv=True)
    conformance_settings = OffloadRestoreSettings(min_saved_tokens=4)
    settings: OffloadRestoreSettings

    @hookimpl
    def recover(self, request: RequestView) -> Sequence[Recovery] | None:
        return WAYS if request.num_computed_tokens >= self.settings.min_saved_tokens else None
