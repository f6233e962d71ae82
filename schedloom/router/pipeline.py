"""From a request to its answer: plan, attempt, fall through once, remember who served."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from schedloom.core.composition import Hook, PolicySet
from schedloom.core.routing import Attempt, Route, SessionOwner
from schedloom.router.attempts import Attempts
from schedloom.router.call import Call
from schedloom.router.continuation import Continuation
from schedloom.router.failures import Failure
from schedloom.router.fleet import Fleet, Health, Target
from schedloom.router.metrics import Metrics
from schedloom.router.relay import Outcome
from schedloom.router.reply import Reply
from schedloom.router.selection import Excuses, Selection
from schedloom.router.sessions import SessionKey, SessionStore
from schedloom.router.settings import RouterSettings
from schedloom.router.tokens import Tokens

_PLAIN = Attempt(Route.PREFILL_DECODE)
_WHOLE = Attempt(Route.DECODE)


class Pipeline:
    """Serves calls. Raises Failure for a call that ends in an error before any output."""

    def __init__(
        self,
        attempts: Attempts,
        fleet: Fleet,
        sessions: SessionStore,
        policies: PolicySet,
        selection: Selection,
        excuses: Excuses,
        tokens: Tokens | None,
        metrics: Metrics,
        settings: RouterSettings,
    ) -> None:
        self._attempts = attempts
        self._fleet = fleet
        self._sessions = sessions
        self._planners = policies.of("plan_route")
        self._metrics = metrics
        self._selection = selection
        self._excuses = excuses
        self._tokens = tokens
        self._continuation = Continuation(attempts.resume, fleet, metrics, settings.max_continuations)

    async def serve(self, call: Call, reply: Reply) -> Outcome:
        if self._tokens is not None:
            call.token_ids = await self._tokens.of(call)
        self._continuation.mark(call)
        if self._planners:
            outcome = await self._serve_planned(call, reply)
        elif call.splittable:
            outcome = await self._attempts.prefill_decode(call, reply, "pd")
        else:
            outcome = await self._attempts.decode(call, reply)
        return await self._continuation.complete(call, reply) if outcome is Outcome.HANDED_BACK else outcome

    async def _serve_planned(self, call: Call, reply: Reply) -> Outcome:
        if call.key is not None:
            reply.on_success = functools.partial(self._bind, call.key)
        attempt = self._cheapest(call, await self._owner(call))
        target = self._target(attempt)
        if attempt.route is Route.DECODE:
            return await self._attempts.decode(call, reply, target)
        if attempt.route in (Route.PREFILL_DECODE, Route.PULL_BACK) or target is None:
            return await self._attempts.prefill_decode(call, reply, "pd", target)
        if not self._selection.permits(call, target):
            return await self._attempts.prefill_decode(call, reply, "pd")
        return await self._append(call, reply, target)

    async def _append(self, call: Call, reply: Reply, target: Target) -> Outcome:
        """A local attempt, and the ordinary way once when it is turned away, or fails before any output."""
        avoid = []
        try:
            outcome = await self._append_only(call, reply, target)
            if outcome is not Outcome.REJECTED:
                return outcome
        except Failure as failure:
            if not failure.is_the_engines_fault:
                raise
            avoid.append(target.worker)
        return await self._attempts.prefill_decode(call, reply, "fallback", avoid=avoid)

    async def _append_only(self, call: Call, reply: Reply, target: Target) -> Outcome:
        result = "error"
        try:
            outcome = await self._attempts.append(call, reply, target)
            result = "rejected" if outcome is Outcome.REJECTED else "hit"
            return outcome
        finally:
            self._metrics.local_attempt("hit" if reply.started else result)

    async def _owner(self, call: Call) -> SessionOwner | None:
        """The session's owner while it lives."""
        owner = await self._sessions.owner(call.key) if call.key is not None else None
        return owner if owner is not None and self._fleet.owner_is_here(owner) else None

    async def _bind(self, key: SessionKey, reply: Reply) -> None:
        if reply.owner is not None:
            await self._sessions.bind(key, reply.owner)

    def _cheapest(self, call: Call, owner: SessionOwner | None) -> Attempt:
        """The best attempt of all policies, and the ordinary one when there is none."""
        best = None
        for planner in self._planners:
            for attempt in self._planned(planner, call, owner):
                fits = call.splittable or attempt.route is Route.DECODE
                if fits and self._is_possible(attempt) and (best is None or attempt.expected_cost < best.expected_cost):
                    best = attempt
        return best or (_PLAIN if call.splittable else _WHOLE)

    def _planned(self, planner: Hook, call: Call, owner: SessionOwner | None) -> Sequence[Attempt]:
        try:
            return tuple(planner.call(call.route, owner, self._fleet) or ())
        except Exception:
            self._excuses.note(planner.policy, "plan a route")
            return ()

    def _is_possible(self, attempt: Attempt) -> bool:
        """Whether the Decoder an attempt names is there and does what is asked of it."""
        if attempt.worker is None:
            return attempt.route not in (Route.APPEND, Route.PULL_BACK)
        worker = self._fleet.find(attempt.worker)
        if worker is None or worker.health is not Health.READY or not worker.can_decode:
            return False
        if attempt.rank is not None and not worker.has_rank(attempt.rank):
            return False
        if attempt.route is Route.PULL_BACK:
            return worker.contract.bidirectional_kv
        return attempt.route is not Route.APPEND or worker.takes_local_attempts

    def _target(self, attempt: Attempt) -> Target | None:
        worker = self._fleet.find(attempt.worker) if attempt.worker is not None else None
        return None if worker is None else Target.of(worker, attempt.rank)
