"""A request that its engine handed back goes on elsewhere, from exactly the tokens that were produced."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import orjson

from schedloom.core.continuation import CONTINUABLE_KEY, RESUME_KEY, HandBack
from schedloom.core.wire import PROTOCOL_VERSION
from schedloom.router.continuation.continuable import is_continuable, is_seamless
from schedloom.router.continuation.told import Differs
from schedloom.router.failures import Failure
from schedloom.router.fleet.fleet import Fleet
from schedloom.router.http.upstream import TooLate
from schedloom.router.relay import Outcome
from schedloom.router.reply import Reply
from schedloom.router.requests.body import GenerationBody, Marks
from schedloom.router.requests.call import Call
from schedloom.router.sse import parsed
from schedloom.router.telemetry.metrics import Metrics
from schedloom.router.transfer.modes import Mode

log = logging.getLogger(__name__)

Pass = Callable[[Call, Reply], Awaitable[Outcome]]
"""Once through a Prefiller and a Decoder that continues, rather not the one that handed the call back."""

_CONTINUABLE: Final[Marks] = {CONTINUABLE_KEY: PROTOCOL_VERSION}
_PREFILLERS_ARE_ASKED_AT: Final = "/v1/completions"
_TOLD_TO_PREFILLERS: Final = ("model", "cache_salt", "priority", "vllm_xargs")


class Continuation:
    """Marks calls that may be handed back, and completes those that were, at most ``most`` times each."""

    def __init__(self, once_more: Pass, fleet: Fleet, metrics: Metrics, most: int) -> None:
        self._once_more = once_more
        self._fleet = fleet
        self._metrics = metrics
        self._most = most

    def mark(self, call: Call) -> None:
        """To be done before the first attempt; no Decoder hands back what is not marked."""
        possible = self._most and self._fleet.prefillers and self._fleet.resumers and self._find_each_other(call)
        if possible and is_continuable(call.path, call.body.fields) and self._is_seamless(call):
            call.marks = _CONTINUABLE

    def _is_seamless(self, call: Call) -> bool:
        return is_seamless(call.body.fields, (worker.contract for worker in self._fleet.resumers))

    def _find_each_other(self, call: Call) -> bool:
        """Whether a Decoder would know its request in what a Prefiller is asked: where KV is written, by the id alone.

        vLLM puts the name of the API before it.
        """
        return self._fleet.mode is Mode.PULL or call.path == _PREFILLERS_ARE_ASKED_AT

    async def complete(self, call: Call, reply: Reply) -> Outcome:
        """From a hand-back to the end of the answer. Raises Failure while the client has nothing."""
        for left in range(self._most - 1, -1, -1):
            outcome = await self._counted(call, reply, again=left > 0)
            if outcome is not Outcome.HANDED_BACK:
                return outcome
        raise AssertionError("the last continuation is not marked, so that nobody hands it back")

    async def _counted(self, call: Call, reply: Reply, *, again: bool) -> Outcome:
        outcome = Outcome.BROKEN
        try:
            outcome = await self._attempt(call, reply, again=again)
            return outcome
        finally:
            continued = reply.succeeded or outcome is Outcome.HANDED_BACK
            self._metrics.continuation("continued" if continued else "failed")

    async def _attempt(self, call: Call, reply: Reply, *, again: bool) -> Outcome:
        try:
            return await self._go_on(call, reply, again=again)
        except Failure as failure:
            log.warning("a request that was handed back is lost: %s", failure.body.decode(errors="replace"))
            if not reply.started:
                raise
            await reply.stop(failure)
            return Outcome.BROKEN

    async def _go_on(self, call: Call, reply: Reply, *, again: bool) -> Outcome:
        """Raises Failure with the reason why the request cannot be continued."""
        story = reply.story
        assert story is not None, "whoever was handed back was marked, and has one"
        try:
            outcome = await self._once_more(_continued(call, await story.continue_(), again), reply)
        except TooLate:
            raise _lost(504, "The Decoder could not be reached in time after the prefill.") from None
        except Differs as difference:
            raise _lost(502, f"{difference}.") from None
        except Failure as failure:
            raise _because_of(failure) from None
        if outcome is Outcome.REJECTED:
            raise _lost(502, f"The Decoder turned it away: {story.refusal or 'no reason given'}.")
        return outcome


def _continued(call: Call, handed_back: HandBack, again: bool) -> Call:
    """``call`` as the next engines get it; without output so far there is nothing to resume."""
    marks = _CONTINUABLE if again else {}
    if not handed_back.output:
        return call.marked(marks)
    tokens = _tokens_of(call, handed_back)
    return call.marked({**marks, RESUME_KEY: handed_back.ticket.written()}, tokens)


def _tokens_of(call: Call, handed_back: HandBack) -> Call:
    """What a Prefiller computes: the prompt, and the output so far behind it."""
    fields = {key: call.body.fields[key] for key in _TOLD_TO_PREFILLERS if key in call.body.fields}
    raw = orjson.dumps({**fields, "prompt": [*handed_back.prompt, *handed_back.output]})
    return call.asking(_PREFILLERS_ARE_ASKED_AT, GenerationBody(raw))


def _because_of(failure: Failure) -> Failure:
    error = parsed(failure.body).get("error")
    message = error.get("message") if isinstance(error, dict) else None
    status = failure.status if failure.status in (429, 503, 504) else 502
    lost = _lost(status, str(message or f"An engine answered with status {failure.status}."))
    lost.headers = [one for one in failure.headers if one[0] == b"retry-after"] or lost.headers
    return lost


def _lost(status: int, reason: str) -> Failure:
    message = f"The engine handed the request back, and it could not be continued. {reason}"
    return Failure.own(status, message, "continuation_failed")
