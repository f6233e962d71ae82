"""A session's engines by highest random weight, which needs no table and so outlives every router."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Annotated, TypeVar

from pydantic import Field

from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy, ScoreSettings
from schedloom.core.routing import Attempt, Candidate, FleetView, Leg, Route, RouteRequest, SessionOwner
from schedloom.policies.session_owner.policy import TURNS_AWAY

_Place = TypeVar("_Place", bound=Candidate)


class RendezvousSettings(ScoreSettings):
    """How much load a session's place is worth."""

    weight: Annotated[float, Field(gt=0)] = 10.0
    """How much its scores count beside those of others: a session's place stands against all that weigh 1."""

    max_lead: Annotated[int, Field(ge=0)] = 16
    """Requests that a Decoder's rank may have under way beyond the least busy one and still be a session's place."""

    max_prefill_lead: Annotated[int, Field(ge=0)] = 4
    """The same of Prefillers, where one request waits for another."""

    attempts: bool = True
    """Whether a follow-up turn of a session whose owner is not known is tried on the session's Decoder."""


class Rendezvous(Policy):
    """Gives each session a Prefiller and a Decoder of its own, by a hash of both names.

    What became of a session's owner is not known after a restart, and to a second router; its Decoder by this hash is.
    """

    name = "rendezvous"
    Settings = RendezvousSettings
    conformance_settings = RendezvousSettings(max_lead=1, max_prefill_lead=0)
    settings: RendezvousSettings

    @hookimpl
    def score_workers(self, request: RouteRequest, leg: Leg, candidates: Sequence[Candidate]) -> list[float] | None:
        if request.session is None:
            return None
        lead = self.settings.max_prefill_lead if leg is Leg.PREFILL else self.settings.max_lead
        place = _first(request, _within(lead, candidates))
        return [float(candidate is place) for candidate in candidates]

    @hookimpl
    def plan_route(self, request: RouteRequest, owner: SessionOwner | None, fleet: FleetView) -> list[Attempt] | None:
        """An attempt where the session would be, had nothing moved it: not where it would go now."""
        is_lost = self.settings.attempts and owner is None and request.session is not None
        if not (is_lost and request.splittable and request.follows_up and fleet.decoders):
            return None
        places = [place for decoder in fleet.decoders for place in decoder.targets]
        home = _first(request, places)
        if TURNS_AWAY in home.contract.inactive or home not in _within(self.settings.max_lead, places):
            return None
        return [Attempt(Route.APPEND, worker=home.name, rank=home.rank)]


def _within(lead: int, places: Sequence[_Place]) -> list[_Place]:
    """Those that are not busier than the least busy by more than ``lead`` requests."""
    limit = min(place.in_flight for place in places) + lead
    return [place for place in places if place.in_flight <= limit]


def _first(request: RouteRequest, places: Iterable[_Place]) -> _Place:
    """The one that weighs most together with the session. When it leaves, no session of another moves."""
    session = f"\0{request.model}\0{request.session}".encode("utf-8", "surrogatepass")
    return max(places, key=lambda place: hashlib.sha256(f"{place.origin}\0{place.rank}".encode() + session).digest())
