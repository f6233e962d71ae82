"""Let requests with little left to compute go before those with much."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schedloom.core.decisions import Lane
from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy, PolicySettings
from schedloom.core.views import EngineView, RequestView


class ShortRequestFirstSettings(PolicySettings):
    """Which requests are short, and how long a long one may be passed over."""

    short_tokens: Annotated[int, Field(ge=1)] = 1024
    """Prompt tokens left to compute up to which a request is short."""

    max_wait_seconds: Annotated[float, Field(ge=0)] = 10.0
    """A long request goes before every short one that arrives this much later, or more."""


class ShortRequestFirst(Policy):
    """Two lanes, short before long; within a lane first come, first served."""

    name = "short_request_first"
    Settings = ShortRequestFirstSettings
    conformance_settings = ShortRequestFirstSettings(short_tokens=8, max_wait_seconds=20)
    settings: ShortRequestFirstSettings

    @hookimpl
    def queue_key(self, request: RequestView, view: EngineView) -> Lane | None:
        if self._is_short(request, view):
            return None
        return Lane("long", self.settings.max_wait_seconds)

    def _is_short(self, request: RequestView, view: EngineView) -> bool:
        tokens, short = request.num_prompt_tokens, self.settings.short_tokens
        return tokens <= short or tokens - view.reusable_kv(request).known_tokens <= short
