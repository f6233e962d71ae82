"""The Decoder first: vllm-ascend's layerwise Mooncake connector.

The Decoder has room for the prompt's KV before anything is computed. It then asks the router, at an address that the
router gave it for this one request, for a prefill that writes to it layer by layer.
"""

from __future__ import annotations

import asyncio

from schedloom.router.dispatch import Dispatcher
from schedloom.router.failures import Failure
from schedloom.router.fleet.worker import Target
from schedloom.router.http.upstream import TooLate
from schedloom.router.relay import Outcome
from schedloom.router.tasks import stopped
from schedloom.router.transfer.background import Background
from schedloom.router.transfer.callbacks import Callbacks
from schedloom.router.transfer.parameters import Parameters
from schedloom.router.transfer.protocol import Passage
from schedloom.router.transfer.terms import Terms
from schedloom.router.transfer.waiting import Wait


class LayerwiseTransfer:
    """A prefill that a Decoder has asked for is finished, whoever leaves: the Decoder keeps room for it until then."""

    def __init__(self, dispatcher: Dispatcher, callbacks: Callbacks, terms: Terms) -> None:
        self._dispatcher = dispatcher
        self._terms = terms
        self._callbacks = callbacks
        self._background = Background()

    async def serve(self, passage: Passage) -> Outcome:
        call, target = passage.call, passage.choose_decoder()
        with self._callbacks.expected(passage.request_id) as expected:
            body = call.body.for_decoder(_ask_at(expected.address), call.marks_for(target.worker))
            dispatch = self._dispatcher.dispatch(call, target, passage.request_id, body)
            dispatch.timeouts = self._dispatcher.for_one_that_waits
            generate = self._dispatcher.generate(call, passage.reply, dispatch, passage.decision)
            decode = self._background.keep(generate)
            wait = Wait()
            prefill = self._background.keep(self._prefill(passage, target, expected.parameters, wait))
            return await self._both(prefill, decode, passage, wait)

    async def _both(
        self, prefill: asyncio.Task[None], decode: asyncio.Task[Outcome], passage: Passage, wait: Wait
    ) -> Outcome:
        had_begun = passage.reply.started
        try:
            failure = await wait.failure(prefill, decode)
            if failure is not None and passage.reply.started == had_begun:
                passage.reply.owner = None
                raise failure
            return await decode
        except (Failure, TooLate):
            await stopped(decode)
            passage.may_repeat = False
            raise
        finally:
            decode.cancel()

    async def _prefill(self, passage: Passage, target: Target, asked: asyncio.Future[Parameters], wait: Wait) -> None:
        """Once more, perhaps elsewhere, when it fails: any Prefiller can write to the Decoder that waits."""
        body = passage.call.prefill.body.for_prefiller(self._terms.checked(await asked, target))
        source = passage.choose_prefiller()
        try:
            return await self._send(passage, source, body, wait)
        except Failure as failure:
            if not failure.may_pass or not passage.repeats():
                raise
            passage.effort.failed(failure)
        await self._send(passage, passage.choose_prefiller(last=source), body, wait)

    async def _send(self, passage: Passage, source: Target, body: bytes, wait: Wait) -> None:
        call = passage.call.prefill
        dispatch = self._dispatcher.dispatch(call, source, passage.request_id, body)
        dispatch.on_given_up = lambda: passage.may_repeat_elsewhere(source) or wait.end(source.worker)
        await self._dispatcher.prefill(call, dispatch, bytes)

    async def close(self) -> None:
        await self._background.close()


def _ask_at(address: str) -> Parameters:
    return {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": address}
