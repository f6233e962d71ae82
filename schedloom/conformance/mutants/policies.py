"""Policies that break what a policy promises."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

from schedloom.core.decisions import Admission, Verdict
from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy
from schedloom.core.views import EngineView, RequestView


class RejectsUnmarked(Policy):
    """It turns long prompts away, the router's mark or not."""

    name = "rejects_unmarked"

    @hookimpl
    def admit(self, request: RequestView) -> Admission | None:
        return Admission(Verdict.REJECT, "too_long") if request.num_prompt_tokens > 40 else None


class HoldsForever(Policy):
    """It waits for the whole pool to be free, and admits the first request into it, and nobody else."""

    name = "holds_forever"

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self._holds = False

    @hookimpl
    def admit(self, request: RequestView, view: EngineView) -> Admission | None:
        self._holds |= view.num_decoding > 0
        return Admission(Verdict.HOLD, "somebody_decodes") if self._holds else None


class StarvesLongPrompts(Policy):
    """It lets long prompts wait for as long as short ones come."""

    name = "starves_long_prompts"

    @hookimpl
    def admit(self, request: RequestView, view: EngineView) -> Admission | None:
        patient = request.num_prompt_tokens > 30 and view.num_decoding
        return Admission(Verdict.DEFER, "long_prompt") if patient else None


class RemembersAcrossEngines(Policy):
    """It counts in a place that all of its instances share."""

    name = "remembers_across_engines"
    asked: ClassVar[Any] = itertools.count()

    @hookimpl
    def admit(self, request: RequestView) -> Admission | None:
        return Admission(Verdict.DEFER, "every_seventh") if not next(self.asked) % 7 else None


class AnswersNegatively(Policy):
    """Its limit falls below zero where others would stop at it."""

    name = "answers_negatively"

    @hookimpl
    def limit_tokens(self, request: RequestView, tokens: int, view: EngineView) -> int | None:
        return tokens - 8 * view.num_decoding


class Raises(Policy):
    """It divides by the number of running requests."""

    name = "raises"

    @hookimpl
    def limit_tokens(self, request: RequestView, tokens: int, view: EngineView) -> int | None:
        return max(8, tokens // view.num_decoding)


class WritesToRequests(Policy):
    """It keeps its notes on the requests themselves."""

    name = "writes_to_requests"

    @hookimpl
    def admit(self, request: RequestView) -> None:
        request.num_prompt_tokens = 1  # type: ignore[misc]


class ActsInShadow(Policy):
    """It reaches behind the view and takes the engine's requests away."""

    name = "acts_in_shadow"

    @hookimpl
    def step_begin(self, view: Any) -> None:
        scheduler = view._scheduler
        if len(scheduler.waiting) > 1:
            scheduler.waiting.reverse()
