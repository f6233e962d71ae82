"""What session_owner promises, seen from what engines are sent: where the follow-up turns of a session go."""

from __future__ import annotations

from typing import Any

from schedloom.core.routing import SessionOwner
from schedloom.core.wire import is_local_attempt
from schedloom.router.app import RouterApp
from schedloom.router.fleet.worker import APPEND_FEATURE, Worker
from schedloom.router.http.upstream import UpstreamRequest
from schedloom.router.requests.tenants import EVERYBODY
from schedloom.router.sessions.store import SessionKey


class Ownership:
    """Watches a router in whose policies an owner may be ``max_lead`` requests ahead.

    ``guesses``: where no owner is known, a follow-up turn may be tried on a Decoder that can turn it away.
    """

    def __init__(self, app: RouterApp, max_lead: int, guesses: bool) -> None:
        self._app, self._max_lead, self._guesses = app, max_lead, guesses
        self._placed: set[str] = set()

    async def wrong_with(self, request: UpstreamRequest, body: dict[str, Any]) -> str | None:
        """Why the engine should not have got this, or ``None``."""
        marked = is_local_attempt(body.get("vllm_xargs"))
        if not marked and body.get("n", 1) == 1:
            return None
        session = dict(request.headers).get(b"x-session-id", b"").decode()
        home = await self._home(session, body["model"], request.origin)
        here = home is not None and home.origin == request.origin
        lead = self._lead(home, request.origin) if home is not None else 0.0
        if not marked:
            is_new = self._is_new(body["user"])
            elsewhere = is_new and home in self._app.fleet.decoders and not here and lead <= self._max_lead
            return "a whole request away from the owner of its session" if elsewhere else None
        if home is None and self._guesses and body.get("messages"):
            home = next(worker for worker in self._app.fleet.workers if worker.origin == request.origin)
        elif home is None or not here:
            return "an attempt away from the owner of its session"
        if APPEND_FEATURE in home.contract.inactive:
            return "an attempt at an owner that turns nobody away"
        return f"an attempt at an owner that is {lead} requests ahead" if lead > self._max_lead else None

    def _is_new(self, label: str) -> bool:
        """Whether its client's request was not sent anywhere before: what failed with the owner may go elsewhere."""
        is_new = label not in self._placed
        self._placed.add(label)
        return is_new

    async def _home(self, session: str, model: str, origin: str) -> Worker | None:
        owner = await self._app.sessions.owner(SessionKey(EVERYBODY.name, model, session)) if session else None
        if owner is None:
            return None
        worker = self._app.fleet.find(owner.worker)
        is_here = self._app.fleet.owner_is_here(owner) or (
            worker is not None and _is_tried_again(worker, owner, origin)
        )
        return worker if is_here else None

    def _lead(self, home: Worker, origin: str) -> float:
        """How far ``home`` is ahead of the least busy Decoder, not counting the request, which is under way to one."""
        loads = {
            worker: worker.load - (worker.origin == origin) / len(worker.targets)
            for worker in (home, *self._app.fleet.decoders)
        }
        return loads[home] - min(loads.values())


def _is_tried_again(worker: Worker, owner: SessionOwner, origin: str) -> bool:
    """Whether what goes to ``origin`` is itself the one request by which an owner that was left out may come back."""
    return worker.origin == origin and worker.breaker.is_open and worker.contract.epoch == owner.epoch
