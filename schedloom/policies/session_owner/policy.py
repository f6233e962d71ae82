"""Try a follow-up turn on the Decoder that served the turn before."""

from __future__ import annotations

from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy
from schedloom.core.routing import Attempt, FleetView, Route, RouteRequest, SessionOwner

TURNS_AWAY = "append_prefill"
"""The Decoder's policy that makes an attempt safe to try."""


class SessionOwnerRouting(Policy):
    """One local attempt on the owner's instance and rank, where that Decoder can turn a request away."""

    name = "session_owner"

    @hookimpl
    def plan_route(self, request: RouteRequest, owner: SessionOwner | None, fleet: FleetView) -> list[Attempt] | None:
        if owner is None or not request.splittable:
            return None
        for decoder in fleet.decoders:
            if decoder.name == owner.worker and decoder.contract.epoch == owner.epoch:
                if TURNS_AWAY in decoder.contract.inactive:
                    return None
                return [Attempt(Route.APPEND, worker=owner.worker, rank=owner.rank)]
        return None
