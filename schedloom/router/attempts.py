"""The ways to serve a call: one dispatch to a Decoder, or a pass through a Prefiller and a Decoder."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable

from schedloom.router.dispatch import Dispatcher
from schedloom.router.effort import A_PASS, Effort
from schedloom.router.failures import Failure
from schedloom.router.fleet.breaker import Clock, RetryBudget
from schedloom.router.fleet.fleet import Doubt, Fleet
from schedloom.router.fleet.worker import Target, Worker
from schedloom.router.http.upstream import TooLate, Upstream
from schedloom.router.learning import Lessons
from schedloom.router.relay import Outcome
from schedloom.router.reply import Reply
from schedloom.router.requests.call import Call, new_request_id
from schedloom.router.selection import Selection
from schedloom.router.settings import RouterSettings
from schedloom.router.telemetry.metrics import Metrics
from schedloom.router.tokens import Tokens
from schedloom.router.transfer.callbacks import Callbacks, callback_origin
from schedloom.router.transfer.layerwise import LayerwiseTransfer
from schedloom.router.transfer.modes import Mode
from schedloom.router.transfer.protocol import Passage, Resumption, Transfer
from schedloom.router.transfer.pull import PullTransfer
from schedloom.router.transfer.pull_back import PullBack
from schedloom.router.transfer.push import PushTransfer
from schedloom.router.transfer.terms import Terms

log = logging.getLogger(__name__)

TOO_LATE = (504, "The Decoder could not be reached in time after the prefill.", "handoff_timeout")

_Serve = Callable[[Effort, Target | None, str], Awaitable[Outcome]]
"""The id is that of the attempt."""


class Attempts:
    """Makes attempts. Each raises Failure while the client has nothing yet, or returns how it ended.

    ``beginning`` are the requests under way that may still be given to others: by their efforts, as long as attempts
    are made for them.
    """

    def __init__(
        self,
        upstream: Upstream,
        fleet: Fleet,
        selection: Selection,
        lessons: Lessons,
        suspect: Callable[[Worker], None],
        settings: RouterSettings,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self.beginning: dict[Effort, Reply] = {}
        self._resuming: set[Effort] = set()
        self._metrics = metrics
        self._budget = RetryBudget(clock)
        self._selection = selection
        self._dispatcher = Dispatcher(upstream, lessons, suspect, settings, metrics)
        terms = Terms(settings.transfer_keys, metrics, suspect)
        pull_back = None
        if settings.pulls_back:
            tokens = Tokens(upstream, fleet, settings, metrics)
            pull_back = PullBack(
                fleet, tokens, terms, clock, settings.session_capacity, settings.handoff_timeout_seconds
            )
        self.callbacks = Callbacks(callback_origin(settings), settings.handoff_timeout_seconds)
        self._transfers: dict[Mode, Transfer] = {
            Mode.PULL: PullTransfer(self._dispatcher, selection.decoder, terms, pull_back),
            Mode.PUSH: PushTransfer(self._dispatcher, selection.decoder),
            Mode.LAYERWISE: LayerwiseTransfer(self._dispatcher, self.callbacks, terms),
        }

    def append(self, call: Call, reply: Reply, target: Target) -> Awaitable[Outcome]:
        """Ask a Decoder to reuse what it holds; it may turn the request away."""
        body = call.body.for_local_attempt(call.marks_for(target.worker))
        dispatch = self._dispatcher.dispatch(call, target, new_request_id(), body)
        return self._dispatcher.generate(call, reply, dispatch, "append", local=True)

    def decode(self, call: Call, reply: Reply, target: Target | None = None) -> Awaitable[Outcome]:
        """Have one Decoder do everything."""
        if target is None:
            self._fleet.require_decoder()
        return self._until_served(functools.partial(self._decode, call, reply), reply, Effort(), target, needed=1)

    def prefill_decode(
        self,
        call: Call,
        reply: Reply,
        decision: str,
        target: Target | None = None,
        effort: Effort | None = None,
        has_begun: bool = False,
    ) -> Awaitable[Outcome]:
        """Have a Prefiller compute the prompt's KV, and a Decoder take it and answer. A request that ``has_begun``
        another way may go by engines that drain.
        """
        if not has_begun:
            self._fleet.require_both()
        serve = functools.partial(self._pass, call, reply, decision)
        return self._until_served(serve, reply, effort or Effort(), target, needed=A_PASS)

    async def _until_served(
        self, serve: _Serve, reply: Reply, effort: Effort, target: Target | None, needed: int
    ) -> Outcome:
        """What fails before any output is tried again where that may help, within the work that one request may cause:
        by others, as far as the budget for second tries reaches, or with a fresh prefill, once, when the hand-over came
        too late for the Prefiller's lease.
        """
        self._budget.count_request()
        self.beginning[effort] = reply
        try:
            while True:
                request_id = new_request_id()
                if effort.loudness is not None:
                    log.log(effort.loudness, "request %s is tried again as %s", reply.request_id, request_id)
                try:
                    return await serve(effort, target, request_id)
                except TooLate:
                    if effort.was_late or effort.left < needed:
                        raise Failure.own(*TOO_LATE) from None
                    effort.came_late()
                    log.warning("a Decoder was not reached in time (request %s)", request_id)
                except Failure as failure:
                    effort.failed(failure)
                    if not (failure.may_pass and self._may_help(effort, needed) and self._budget.take()):
                        raise
                self._metrics.retries.inc()
                target = None
        finally:
            del self.beginning[effort]

    def _may_help(self, effort: Effort, needed: int) -> bool:
        return effort.left >= needed and effort.may_help(self._fleet, prefills=needed > 1)

    async def resume(self, call: Call, reply: Reply) -> Outcome:
        """Once through a Prefiller and a Decoder that continues, rather not the one that the reply is of so far.

        Raises TooLate as well.
        """
        giver = self._fleet.find(reply.owner.worker) if reply.owner is not None else None
        effort = Effort(A_PASS, {} if giver is None else {giver: Doubt.FAILED})
        request_id = reply.request_id = new_request_id()
        reply.owner = None
        self._selection.resumer(effort.doubts)
        passage = Resumption(call, reply, reply.decision, request_id, self._selection, effort)
        self._resuming.add(effort)
        try:
            return await self._transfers[self._fleet.mode].serve(passage)
        finally:
            self._resuming.remove(effort)

    async def _decode(
        self, call: Call, reply: Reply, effort: Effort, target: Target | None, request_id: str
    ) -> Outcome:
        target = target or self._selection.decoder(call, effort.doubts)
        effort.asks(target.worker)
        body = call.body.for_one_decoder(call.marks_for(target.worker))
        dispatch = self._dispatcher.dispatch(call, target, request_id, body)
        return await self._dispatcher.generate(call, reply, dispatch, "decode")

    def _pass(
        self, call: Call, reply: Reply, decision: str, effort: Effort, target: Target | None, request_id: str
    ) -> Awaitable[Outcome]:
        self._fleet.require_last_decoder()
        reply.decision, reply.request_id, reply.owner = decision, request_id, None
        passage = Passage(call, reply, decision, request_id, self._selection, effort, target)
        passage.on_repeat = self._budget.owe
        return self._transfers[self._fleet.mode].serve(passage)

    def need(self, worker: Worker) -> bool:
        """Whether a request that is under way still needs ``worker``: to answer, for KV that a Decoder has not taken
        yet, or because there may be nobody else to go on with.
        """
        if worker.in_flight or worker.lends:
            return True
        going_on = [effort for effort, reply in self.beginning.items() if not reply.started]
        going_on += self._resuming
        if any(effort.needs(worker) for effort in going_on):
            return True
        return bool(going_on) and worker.known and self._fleet.is_last(worker)

    async def close(self) -> None:
        for transfer in self._transfers.values():
            await transfer.close()
