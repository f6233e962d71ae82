"""Hand a preempted request back to the router, where its prefill does not slow the streams of this Decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from schedloom.core.decisions import Recovery
from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy, PolicySettings, Requirements
from schedloom.core.views import RequestView

WAYS = (Recovery.RETURN, Recovery.RECOMPUTE)


class RecomputeSettings(PolicySettings):
    """When a way through the router is worth its while."""

    min_returned_tokens: Annotated[int, Field(ge=1)] = 512
    """A request with fewer computed tokens is left to vLLM, which computes them again here."""


class Recompute(Policy):
    """Through the router to a Prefiller; vLLM's own way where a request cannot be continued from its tokens alone."""

    name = "recompute"
    Settings = RecomputeSettings
    requires = Requirements(decoder=True)
    hands_back = True
    conformance_settings = RecomputeSettings(min_returned_tokens=4)
    settings: RecomputeSettings

    @hookimpl
    def recover(self, request: RequestView) -> Sequence[Recovery] | None:
        return WAYS if request.num_computed_tokens >= self.settings.min_returned_tokens else None
