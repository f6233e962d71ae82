"""What every way of moving KV is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from schedloom.router.call import Call
from schedloom.router.failures import Failure
from schedloom.router.fleet import Target
from schedloom.router.relay import Outcome
from schedloom.router.reply import Reply


@dataclass(slots=True)
class Passage:
    """One pass of a call through a Prefiller and a Decoder, both told the same ``request_id``.

    ``choose_prefiller`` and ``choose_decoder`` choose as late as a way allows, by what is known then; both raise
    Failure (503) when there is nobody. No work is repeated in a second pass.
    """

    call: Call
    reply: Reply
    decision: str
    request_id: str
    choose_prefiller: Callable[[], Target]
    choose_decoder: Callable[[], Target]
    is_second: bool = False


class Final(Failure):
    """What another pass may not be spent on: the work that a request may cause has been done."""

    @classmethod
    def of(cls, failure: Failure) -> Final:
        return cls(failure.status, failure.body, failure.headers)

    @property
    def may_pass(self) -> bool:
        return False


class Transfer(Protocol):
    """A way of moving KV, as the engines' connectors speak it."""

    async def serve(self, passage: Passage) -> Outcome:
        """Have both engines serve the call; the Decoder's answer is the client's.

        Raises Failure while the client has nothing yet, TooLate when the Decoder could not be reached while the
        Prefiller keeps the KV. Whatever happens, a client that leaves included, no engine keeps KV for nobody.
        """
        ...

    async def close(self) -> None: ...
