"""From a request to its answer: plan, attempt, fall through once, remember who served."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Sequence
from typing import Any

from schedloom.core.composition import Hook, PolicySet
from schedloom.core.routing import Attempt, Route, SessionOwner
from schedloom.router.attempts import Attempts
from schedloom.router.continuation.continuation import Continuation
from schedloom.router.effort import Effort
from schedloom.router.failures import Failure
from schedloom.router.fleet.fleet import Fleet
from schedloom.router.fleet.worker import Health, Target
from schedloom.router.relay import Outcome
from schedloom.router.reply import Reply
from schedloom.router.requests.call import Call
from schedloom.router.selection import Excuses, Selection
from schedloom.router.sessions.store import SessionKey, SessionsAtHand, SessionStore
from schedloom.router.settings import RouterSettings
from schedloom.router.telemetry.metrics import Metrics
from schedloom.router.tokens import Tokens


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
        self._at_hand = sessions if isinstance(sessions, SessionsAtHand) else None
        self._planners = policies.of("plan_route")
        self._metrics = metrics
        self._selection = selection
        self._excuses = excuses
        self._tokens = tokens
        self._continuation = Continuation(attempts.resume, fleet, metrics, settings.max_continuations)

    def serve(self, call: Call, reply: Reply) -> Awaitable[Outcome]:
        """Attempted at once where nothing is to be asked before, and nothing to be done after."""
        self._continuation.mark(call)
        if self._planners and call.key is not None:
            reply.on_success = functools.partial(self._bind, call.key)
        if self._tokens is not None or self._at_hand is None or call.marks:
            return self._serve(call, reply)
        owner = None if call.key is None else self._at_hand.find(call.key)
        return self._attempt(call, reply, owner)

    async def _serve(self, call: Call, reply: Reply) -> Outcome:
        if self._tokens is not None:
            call.token_ids = await self._tokens.of(call) or call.token_ids
        owner = await self._sessions.owner(call.key) if self._planners and call.key is not None else None
        outcome = await self._attempt(call, reply, owner)
        return await self._continuation.complete(call, reply) if outcome is Outcome.HANDED_BACK else outcome

    def _attempt(self, call: Call, reply: Reply, owner: SessionOwner | None) -> Awaitable[Outcome]:
        """What is planned for a session that ``owner`` served last."""
        attempt = self._cheapest(call, owner if owner is not None and self._fleet.owner_is_here(owner) else None)
        target = None if attempt is None else self._target(attempt)
        if not call.splittable or (attempt is not None and attempt.route is Route.DECODE):
            return self._attempts.decode(call, reply, target)
        if attempt is None or target is None or attempt.route is not Route.APPEND:
            return self._attempts.prefill_decode(call, reply, "pd", target)
        if not self._selection.permits(call, target):
            return self._attempts.prefill_decode(call, reply, "pd")
        return self._append(call, reply, target)

    async def _append(self, call: Call, reply: Reply, target: Target) -> Outcome:
        """A local attempt, and the ordinary way once when it is turned away, or fails before any output."""
        effort, may_go_on = Effort(), self._fleet.has_both
        effort.asks(target.worker)
        self._attempts.beginning[effort] = reply
        try:
            outcome = await self._append_only(call, reply, target)
            if outcome is not Outcome.REJECTED:
                return outcome
            effort.turned_away(target.worker)
        except Failure as failure:
            if not failure.is_the_engines_fault:
                raise
            effort.failed(failure)
        finally:
            del self._attempts.beginning[effort]
        return await self._attempts.prefill_decode(call, reply, "fallback", effort=effort, has_begun=may_go_on)

    async def _append_only(self, call: Call, reply: Reply, target: Target) -> Outcome:
        result = "error"
        try:
            outcome = await self._attempts.append(call, reply, target)
            result = "rejected" if outcome is Outcome.REJECTED else "hit"
            return outcome
        finally:
            self._metrics.local_attempt("hit" if reply.started else result)

    def _bind(self, key: SessionKey, reply: Reply) -> Awaitable[None] | None:
        """Returns what is to be awaited where sessions are not at hand."""
        if reply.owner is None:
            return None
        if self._at_hand is None:
            return self._sessions.bind(key, reply.owner)
        self._at_hand.keep(key, reply.owner)
        return None

    def _cheapest(self, call: Call, owner: SessionOwner | None) -> Attempt | None:
        """The best attempt of all policies."""
        best = None
        for planner in self._planners:
            for attempt in self._planned(planner, call, owner):
                fits = call.splittable or attempt.route is Route.DECODE
                if fits and self._is_possible(attempt) and (best is None or attempt.expected_cost < best.expected_cost):
                    best = attempt
        return best

    def _planned(self, planner: Hook, call: Call, owner: SessionOwner | None) -> Sequence[Attempt]:
        try:
            plan = planner.call(call, owner, self._fleet)
            return tuple(map(_checked, plan)) if plan else ()
        except Exception:
            self._excuses.note(planner.policy, "plan a route")
            return ()

    def _is_possible(self, attempt: Attempt) -> bool:
        """Whether the Decoder an attempt names is there and does what is asked of it."""
        if attempt.worker is None:
            return attempt.route not in (Route.APPEND, Route.PULL_BACK)
        worker = self._fleet.find(attempt.worker)
        if worker is None or worker.health is not Health.READY or not worker.can_decode or not worker.breaker.allows:
            return False
        if attempt.rank is not None and not worker.has_rank(attempt.rank):
            return False
        if attempt.route is Route.PULL_BACK:
            return worker.contract.bidirectional_kv
        return attempt.route is not Route.APPEND or worker.takes_local_attempts

    def _target(self, attempt: Attempt) -> Target | None:
        worker = self._fleet.find(attempt.worker) if attempt.worker is not None else None
        return None if worker is None else Target.of(worker, attempt.rank)


def _checked(attempt: Any) -> Attempt:
    if not isinstance(attempt, Attempt):
        raise TypeError(f"a plan is a list of attempts, not of {attempt!r}")
    return attempt
