"""Routing policies from which a single guard is taken away: each stands before the policy that it names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from schedloom.core.hookspecs import hookimpl
from schedloom.core.routing import Attempt, FleetView, Route, RouteRequest, SessionOwner


class TriesAnotherDecoder:
    """A session's next turn is tried where nothing is known of it."""

    policy = "session_owner"

    @hookimpl
    def plan_route(
        self: Any, request: RouteRequest, owner: SessionOwner | None, fleet: FleetView
    ) -> list[Attempt] | None:
        planned = super().plan_route(request, owner, fleet) or []  # type: ignore[misc]
        others = [one.name for one in fleet.decoders if owner is None or one.name != owner.worker]
        return [replace(attempt, worker=others[0], rank=0) for attempt in planned if others] or None


class TriesWhereNobodyIsTurnedAway:
    """A Decoder's policy being switched off does not keep it from being tried."""

    policy = "session_owner"

    def _home(self: Any, owner: SessionOwner, fleet: FleetView) -> Any:
        home = super()._home(owner, fleet)  # type: ignore[misc]
        return home and Willing(home)


class Willing:
    """An engine on which all is switched on."""

    def __init__(self, worker: Any) -> None:
        self.contract = worker.contract.model_copy(update={"inactive": []})


class KeepsSessionsWhateverTheLoad:
    """An owner keeps its sessions however far it is ahead."""

    policy = "session_owner"

    def __init__(self: Any, settings: Any = None) -> None:
        super().__init__(settings)  # type: ignore[call-arg]
        self.settings = self.settings.model_copy(update={"max_lead": 1_000_000})


class SendsWholeRequestsAnywhere:
    """A request that cannot be split goes to any Decoder."""

    policy = "session_owner"

    @hookimpl
    def plan_route(
        self: Any, request: RouteRequest, owner: SessionOwner | None, fleet: FleetView
    ) -> list[Attempt] | None:
        planned: list[Attempt] | None = super().plan_route(request, owner, fleet)  # type: ignore[misc]
        return planned if request.splittable else None


class GuessesForFirstTurns:
    """A session's first turn is tried where nothing can be known of it."""

    policy = "rendezvous"

    @hookimpl
    def plan_route(
        self: Any, request: RouteRequest, owner: SessionOwner | None, fleet: FleetView
    ) -> list[Attempt] | None:
        return super().plan_route(FollowUp(request), owner, fleet)  # type: ignore[misc, no-any-return]


class GuessesWhereNobodyIsTurnedAway:
    """A turn is tried on any Decoder of which the session's owner may have been one."""

    policy = "rendezvous"

    @hookimpl
    def plan_route(
        self: Any, request: RouteRequest, owner: SessionOwner | None, fleet: FleetView
    ) -> list[Attempt] | None:
        lost = owner is None and request.session is not None and request.follows_up and request.splittable
        return [Attempt(Route.APPEND, worker=one.name, rank=0) for one in fleet.decoders] if lost else None


class FollowUp:
    """A request that passes for a follow-up turn."""

    follows_up = True

    def __init__(self, request: RouteRequest) -> None:
        self.model, self.session, self.splittable = request.model, request.session, request.splittable
