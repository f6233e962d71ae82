"""The ways to serve a call: one dispatch to a Decoder, or a pass through a Prefiller and a Decoder."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection

from schedloom.router.breaker import Clock, RetryBudget
from schedloom.router.call import Call, new_request_id
from schedloom.router.dispatch import Dispatcher
from schedloom.router.failures import Failure
from schedloom.router.fleet import Fleet, Target, Worker
from schedloom.router.learning import Lessons
from schedloom.router.metrics import Metrics
from schedloom.router.relay import Outcome
from schedloom.router.reply import Reply
from schedloom.router.selection import Selection
from schedloom.router.settings import RouterSettings
from schedloom.router.tokens import Tokens
from schedloom.router.transfer.callbacks import Callbacks, callback_origin
from schedloom.router.transfer.layerwise import LayerwiseTransfer
from schedloom.router.transfer.modes import Mode
from schedloom.router.transfer.protocol import TOO_LATE, Passage, Resumption, Transfer
from schedloom.router.transfer.pull import PullTransfer
from schedloom.router.transfer.pull_back import PullBack
from schedloom.router.transfer.push import PushTransfer
from schedloom.router.upstream import TooLate, Upstream

log = logging.getLogger(__name__)


class Attempts:
    """Makes attempts. Each raises Failure while the client has nothing yet, or returns how it ended."""

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
        self._metrics = metrics
        self._budget = RetryBudget(clock)
        self._selection = selection
        self._dispatcher = Dispatcher(upstream, lessons, suspect, settings)
        pull_back = None
        if settings.pulls_back:
            tokens = Tokens(upstream, fleet, settings, metrics)
            pull_back = PullBack(fleet, tokens, clock, settings.session_capacity, settings.handoff_timeout_seconds)
        self.callbacks = Callbacks(callback_origin(settings), settings.handoff_timeout_seconds)
        self._transfers: dict[Mode, Transfer] = {
            Mode.PULL: PullTransfer(self._dispatcher, selection.decoder, pull_back),
            Mode.PUSH: PushTransfer(self._dispatcher, selection.decoder),
            Mode.LAYERWISE: LayerwiseTransfer(self._dispatcher, self.callbacks),
        }

    def append(self, call: Call, reply: Reply, target: Target) -> Awaitable[Outcome]:
        """Ask a Decoder to reuse what it holds; it may turn the request away."""
        body = call.body.for_local_attempt(call.marks_for(target.worker))
        dispatch = self._dispatcher.dispatch(call, target, new_request_id(), body)
        return self._dispatcher.generate(call, reply, dispatch, "append", local=True)

    async def decode(self, call: Call, reply: Reply, target: Target | None = None) -> Outcome:
        """Have one Decoder do everything."""
        target = target or self._selection.decoder(call)
        body = call.body.for_one_decoder(call.marks_for(target.worker))
        dispatch = self._dispatcher.dispatch(call, target, new_request_id(), body)
        return await self._dispatcher.generate(call, reply, dispatch, "decode")

    async def prefill_decode(
        self,
        call: Call,
        reply: Reply,
        decision: str,
        target: Target | None = None,
        avoid: Collection[Worker] = (),
    ) -> Outcome:
        """Have a Prefiller compute the prompt's KV, and a Decoder take it and answer.

        What fails before any output is tried once more where that may help: with other engines, as far as the
        budget for second tries reaches, or with a fresh prefill when the hand-over came too late for the
        Prefiller's lease.
        """
        self._budget.count_request()
        tried = list(avoid)
        try:
            return await self._pass(call, reply, decision, target, tried)
        except TooLate:
            log.warning("a Decoder was not reached in time; the prefill is repeated")
        except Failure as failure:
            if not (failure.may_pass and self._fleet.has_others(tried) and self._budget.take()):
                raise
        self._metrics.retries.inc()
        try:
            only_one_was_asked = len(tried) == len(avoid) + 1
            return await self._pass(call, reply, decision, None, tried, may_repeat=only_one_was_asked)
        except TooLate:
            raise Failure.own(*TOO_LATE) from None

    async def resume(self, call: Call, reply: Reply) -> Outcome:
        """Once through a Prefiller and a Decoder that continues, rather not the one that the reply is of so far.

        Raises TooLate as well.
        """
        giver = self._fleet.find(reply.owner.worker) if reply.owner is not None else None
        givers = [giver] if giver is not None else []
        request_id = reply.request_id = new_request_id()
        reply.owner = None
        self._selection.resumer(givers)
        passage = Resumption(call, reply, reply.decision, request_id, self._selection, givers)
        return await self._transfers[self._fleet.mode].serve(passage)

    def _pass(
        self,
        call: Call,
        reply: Reply,
        decision: str,
        target: Target | None,
        tried: list[Worker],
        may_repeat: bool = True,
    ) -> Awaitable[Outcome]:
        self._fleet.require_decoder()
        request_id = new_request_id()
        reply.decision, reply.request_id, reply.owner = decision, request_id, None
        passage = Passage(call, reply, decision, request_id, self._selection, tried, target, may_repeat)
        return self._transfers[self._fleet.mode].serve(passage)

    async def close(self) -> None:
        for transfer in self._transfers.values():
            await transfer.close()
