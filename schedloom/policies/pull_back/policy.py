"""Have a Prefiller pull the KV of a session's last turn from the Decoder that kept it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy, PolicySettings
from schedloom.core.routing import Attempt, FleetView, Route, RouteRequest, SessionOwner


class PullBackSettings(PolicySettings):
    """What the way over a Prefiller is taken to cost."""

    expected_cost: Annotated[float, Field(ge=0)] = 0.1
    """Seconds; a local attempt on the owner, where another policy plans one, is taken to cost nothing."""


class PullBackRouting(Policy):
    """Plans the way over a Prefiller, back to the owner, where both sides move KV in both directions."""

    name = "pull_back"
    Settings = PullBackSettings
    settings: PullBackSettings

    @hookimpl
    def plan_route(self, request: RouteRequest, owner: SessionOwner | None, fleet: FleetView) -> list[Attempt] | None:
        if owner is None or not request.splittable:
            return None
        homes = [one for one in fleet.decoders if one.name == owner.worker and one.contract.epoch == owner.epoch]
        if not any(home.contract.bidirectional_kv for home in homes):
            return None
        cost = self.settings.expected_cost
        return [Attempt(Route.PULL_BACK, worker=owner.worker, rank=owner.rank, expected_cost=cost)]
