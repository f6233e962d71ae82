"""Beginnings: what a step begins with, whatever the policies are."""

from __future__ import annotations

from typing import Any

from schedloom.adapters.engine.scheduler import PolicyScheduler
from schedloom.core.composition import PolicySet


class BeginningsPart(PolicyScheduler):
    """Takes up switches and turns the view to the step that begins, before any other part does anything in it."""

    @classmethod
    def serves(cls, policies: PolicySet) -> bool:
        return True

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self._control.begin_step()
        self.view.begin_step(throttle_prefills)
        return super().schedule(throttle_prefills)
