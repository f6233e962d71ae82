"""Try a follow-up turn on the Decoder that served the turn before."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy, PolicySettings
from schedloom.core.routing import Attempt, FleetView, Route, RouteRequest, SessionOwner, WorkerView

TURNS_AWAY = "append_prefill"
"""The Decoder's policy that makes an attempt safe to try."""


class SessionOwnerSettings(PolicySettings):
    """How much load a session's KV is worth."""

    max_lead: Annotated[int, Field(ge=0)] = 16
    """Requests per rank that the owner may have under way beyond the least busy Decoder and still keep its session."""


class SessionOwnerRouting(Policy):
    """One local attempt on the owner's instance and rank, where that Decoder can turn a request away.

    A request that cannot be split goes to the owner as a whole.
    """

    name = "session_owner"
    Settings = SessionOwnerSettings
    conformance_settings = SessionOwnerSettings(max_lead=0)
    settings: SessionOwnerSettings

    @hookimpl
    def plan_route(self, request: RouteRequest, owner: SessionOwner | None, fleet: FleetView) -> list[Attempt] | None:
        home = None if owner is None else self._home(owner, fleet)
        if owner is None or home is None:
            return None
        if not request.splittable:
            return [Attempt(Route.DECODE, worker=owner.worker, rank=owner.rank)]
        if TURNS_AWAY in home.contract.inactive:
            return None
        return [Attempt(Route.APPEND, worker=owner.worker, rank=owner.rank)]

    def _home(self, owner: SessionOwner, fleet: FleetView) -> WorkerView | None:
        """The owner in the life in which it served the session, unless another Decoder would serve the turn sooner."""
        homes = [one for one in fleet.decoders if one.name == owner.worker and one.contract.epoch == owner.epoch]
        limit = min((decoder.load for decoder in fleet.decoders), default=0.0) + self.settings.max_lead
        return next((home for home in homes if home.load <= limit), None)
