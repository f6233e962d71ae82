"""Both engines at once, and the Prefiller writes: NIXL in write mode.

What vLLM 0.32 does decides the order of things here. A Decoder whose request ends while it waits keeps its blocks until
that very Prefiller has written them, and a Prefiller whose Decoder never registered keeps its own to the end of the
lease. So a Decoder is asked when the Prefiller has accepted the prompt, and not before; from then on the prefill is
finished, whoever leaves, and made once more where it failed. Where the Prefiller hangs it is still waited for, but not
by the client.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from schedloom.router.dispatch import Dispatch, Dispatcher, was_refused
from schedloom.router.failures import Failure
from schedloom.router.fleet.worker import Target
from schedloom.router.http.upstream import TooLate
from schedloom.router.relay import Outcome
from schedloom.router.requests.call import Call
from schedloom.router.sse import is_end, tells_an_error
from schedloom.router.tasks import stopped
from schedloom.router.transfer.background import Background
from schedloom.router.transfer.parameters import Parameters
from schedloom.router.transfer.protocol import Passage
from schedloom.router.transfer.waiting import Wait

Choose = Callable[[Call], Target]


class PushTransfer:
    """The Decoder is told where the Prefiller's connector is, and both find each other by the one request id."""

    def __init__(self, dispatcher: Dispatcher, choose_anybody: Choose) -> None:
        self._dispatcher = dispatcher
        self._choose_anybody = choose_anybody
        self._background = Background()

    async def serve(self, passage: Passage) -> Outcome:
        source = passage.choose_prefiller()
        accepted, wait = asyncio.Event(), Wait()
        prefill = self._background.keep(self._prefill_surely(passage, source, accepted, wait))
        try:
            await _until(accepted, prefill)
            dispatch = self._to_decoder(passage, source)
        except BaseException:
            prefill.cancel()
            raise
        return await self._both(prefill, dispatch, passage, source, wait)

    def _to_decoder(self, passage: Passage, source: Target) -> Dispatch:
        call, target = passage.call, passage.choose_decoder()
        body = call.body.for_decoder(where_to_register(source, passage.request_id), call.marks_for(target.worker))
        dispatch = self._dispatcher.hand_over(call, target, passage.request_id, body)
        dispatch.timeouts = self._dispatcher.for_one_that_waits
        dispatch.settle_seconds = self._dispatcher.patience
        return dispatch

    async def _both(
        self, prefill: asyncio.Task[None], dispatch: Dispatch, passage: Passage, source: Target, wait: Wait
    ) -> Outcome:
        reply, had_begun = passage.reply, passage.reply.started
        generate = self._dispatcher.generate(passage.call, reply, dispatch, passage.decision)
        decode = self._background.keep(generate)
        try:
            failure = await wait.failure(prefill, decode)
            if failure is not None and reply.started == had_begun:
                dispatch.abandon()
                reply.owner = None
                raise failure
            return await decode
        except (Failure, TooLate, asyncio.CancelledError) as error:
            if was_refused(dispatch, _error_of(decode)):
                self._let_go(prefill, passage, source)
            if isinstance(error, asyncio.CancelledError):
                raise
            await stopped(decode)
            passage.may_repeat = False
            raise
        finally:
            decode.cancel()

    def _let_go(self, prefill: asyncio.Task[None], passage: Passage, source: Target) -> None:
        """No Decoder has registered, and none will."""
        if not prefill.done():
            prefill.cancel()
        elif prefill.exception() is None:
            self._background.start(self._take_over(passage, where_to_register(source, passage.request_id)))

    async def _prefill_surely(self, passage: Passage, source: Target, accepted: asyncio.Event, wait: Wait) -> None:
        """Once more on the same Prefiller when it fails after it had accepted: a Decoder may wait for it."""
        try:
            return await self._prefill(passage, source, accepted, wait)
        except Failure:
            if not accepted.is_set() or not passage.repeats():
                raise
        passage.effort.asks(source.worker, prefills=True)
        await self._prefill(passage, source, accepted, wait)

    async def _prefill(self, passage: Passage, source: Target, accepted: asyncio.Event, wait: Wait) -> None:
        release = functools.partial(self._release, passage, where_to_register(source, passage.request_id))
        call = passage.call.prefill
        dispatch = self._dispatcher.dispatch(call, source, passage.request_id, call.body.for_prefiller(stream=True))
        dispatch.timeouts = self._dispatcher.for_one_that_waits
        dispatch.on_accepted, dispatch.on_late_answer = accepted.set, release
        dispatch.on_given_up = lambda: not accepted.is_set() or wait.end(source.worker)
        await self._dispatcher.prefill(call, dispatch, bytes)

    def _release(self, passage: Passage, where: Parameters, status: int, body: bytes) -> None:
        """The Prefiller was done when it was cancelled: a Decoder takes the KV over, or it would be kept to no end."""
        if status == 200 and is_end(body) and not tells_an_error(body):
            self._background.start(self._take_over(passage, where))

    async def _take_over(self, passage: Passage, where: Parameters) -> None:
        call = passage.call.prefill
        body = call.body.for_release(where)
        target = self._choose_anybody(call)
        await self._dispatcher.deliver(self._dispatcher.hand_over(call, target, passage.request_id, body))

    async def close(self) -> None:
        await self._background.close()


def _error_of(task: asyncio.Task[Outcome]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


def where_to_register(source: Target, request_id: str) -> Parameters:
    """The transfer parameters with which a Decoder registers at a Prefiller and waits for it to write.

    While it has no room it names ``request_id`` to the Prefiller, which keeps the KV for it: see
    schedloom.adapters.engine.heartbeats.
    """
    endpoint = source.contract.kv_endpoints[source.rank]
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": endpoint.engine_id,
        "remote_request_id": request_id,
        "remote_host": endpoint.host,
        "remote_port": endpoint.port,
        "tp_size": endpoint.tp_size,
        "pp_size": endpoint.pp_size,
    }


async def _until(accepted: asyncio.Event, prefill: asyncio.Task[None]) -> None:
    """Raises the prefill's Failure when it was not accepted."""
    waiting = asyncio.get_running_loop().create_task(accepted.wait())
    try:
        await asyncio.wait({waiting, prefill}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if not accepted.is_set():
        await prefill
