"""The Prefiller first, then a Decoder that pulls: NIXL in read mode, and Mooncake as vllm-ascend has it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Final

import orjson

from schedloom.router.dispatch import Dispatch, Dispatcher, was_refused
from schedloom.router.failures import Failure
from schedloom.router.fleet.fleet import NO_DOUBTS, Doubt, Doubts
from schedloom.router.fleet.worker import Target
from schedloom.router.http.upstream import TooLate
from schedloom.router.relay import Outcome
from schedloom.router.requests.call import Call
from schedloom.router.transfer.background import Background
from schedloom.router.transfer.modes import families
from schedloom.router.transfer.parameters import Parameters, transfer_parameters
from schedloom.router.transfer.protocol import Passage
from schedloom.router.transfer.pull_back import Loan, PullBack
from schedloom.router.transfer.terms import Terms

Choose = Callable[[Call, Doubts], Target]

_DECLINED_AT: Final = "/v1/completions"
_NO_MODEL: Final = "schedloom-declines"


class PullTransfer:
    """The Decoder is told by the Prefiller's own answer where the KV is."""

    def __init__(
        self, dispatcher: Dispatcher, choose_anybody: Choose, terms: Terms, pull_back: PullBack | None = None
    ) -> None:
        self._dispatcher = dispatcher
        self._terms = terms
        self._choose_anybody = choose_anybody
        self._pull_back = pull_back
        self._background = Background()

    async def serve(self, passage: Passage) -> Outcome:
        call, prefill = passage.call, passage.call.prefill
        request_id, source = passage.request_id, passage.choose_prefiller()
        loan = await self._pull_back.recall(call, source) if self._pull_back is not None else None
        to_prefiller = self._to_prefiller(prefill, source, request_id, loan)
        prefilling = self._dispatcher.prefill(prefill, to_prefiller, functools.partial(self._parameters_of, source))
        parameters = await (prefilling if loan is None else loan.during(prefilling))
        target = passage.choose_decoder()
        turn = self._pull_back.turn(call, target) if self._pull_back is not None else None
        body = call.body.for_decoder(parameters, call.marks_for(target.worker), with_ids=turn is not None)
        dispatch = self._dispatcher.hand_over(call, target, request_id, body)
        decision = "pull_back" if loan is not None and passage.decision == "pd" else passage.decision
        passage.reply.turn = turn
        try:
            outcome = await self._dispatcher.generate(call, passage.reply, dispatch, decision)
        except (Failure, TooLate, asyncio.CancelledError) as error:
            if was_refused(dispatch, error):
                self._background.start(self._decline(call, source, dispatch, parameters))
            raise
        if self._pull_back is not None and turn is not None and outcome is Outcome.SERVED:
            self._pull_back.remember(call, target, turn)
        return outcome

    async def _decline(self, call: Call, source: Target, refused: Dispatch, parameters: Parameters) -> None:
        """Have a Decoder, rather another, tell the Prefiller that its KV is not needed.

        What vLLM refuses as it is read frees nothing. What it refuses later does, as for a model that it does not have;
        that it was freed so before does no harm.
        """
        if not families(source.contract):
            return
        asked = {"model": _NO_MODEL, "prompt": [0], "max_tokens": 1, "kv_transfer_params": parameters}
        declining, raw = call.asking(_DECLINED_AT, call.body), orjson.dumps(asked)
        target = self._choose_anybody(declining, {refused.target.worker: Doubt.FAILED})
        await self._dispatcher.deliver(self._dispatcher.hand_over(declining, target, refused.request_id, raw))

    def _parameters_of(self, source: Target, answer: bytes) -> Parameters:
        parameters = transfer_parameters(answer)
        if parameters is None:
            message = "The Prefiller answered without transfer parameters; it does not run as a KV producer."
            raise Failure.own(502, message, "no_transfer_parameters")
        return self._terms.checked(parameters, source)

    def _to_prefiller(self, call: Call, source: Target, request_id: str, loan: Loan | None) -> Dispatch:
        body = call.body.for_prefiller(loan.parameters) if loan is not None else call.body.for_prefiller()
        dispatch = self._dispatcher.dispatch(call, source, request_id, body)
        dispatch.on_late_answer = functools.partial(self._release, call, source, request_id)
        return dispatch

    def _release(self, call: Call, source: Target, request_id: str, status: int, body: bytes) -> None:
        """The Prefiller was done when its client left: a Decoder takes the KV over, or it would be kept to no
        end.
        """
        parameters = transfer_parameters(body) if status == 200 else None
        if parameters is not None:
            self._background.start(self._take_over(call, source, request_id, parameters))

    async def _take_over(self, call: Call, source: Target, request_id: str, parameters: Parameters) -> None:
        parameters = self._terms.checked(parameters, source)
        body, target = call.body.for_release(parameters), self._choose_anybody(call, NO_DOUBTS)
        dispatch = self._dispatcher.hand_over(call, target, request_id, body)
        await self._dispatcher.deliver(dispatch)
        if was_refused(dispatch, None):
            await self._decline(call, source, dispatch, parameters)

    async def close(self) -> None:
        await self._background.close()
