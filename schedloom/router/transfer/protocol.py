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
from schedloom.router.upstream import TooLate

TOO_LATE = (504, "The Decoder could not be reached in time after the prefill.", "handoff_timeout")


@dataclass(slots=True)
class Passage:
    """One pass of a call through a Prefiller and a Decoder, both told the same ``request_id``.

    ``choose_prefiller`` and ``choose_decoder`` choose as late as a way allows, by what is known then; both raise
    Failure (503) when there is nobody. Where ``may_repeat``, a prefill that fails may be made once more, instead of a
    second pass.
    """

    call: Call
    reply: Reply
    decision: str
    request_id: str
    choose_prefiller: Callable[[], Target]
    choose_decoder: Callable[[], Target]
    may_repeat: bool = True
    has_repeated: bool = False

    def repeat(self) -> bool:
        """Whether a prefill that failed may be made again; it then stands for a second pass."""
        self.may_repeat, self.has_repeated = False, self.may_repeat
        return self.has_repeated

    def last_word(self, error: Failure | TooLate) -> Failure | TooLate:
        """``error`` as it ends this pass."""
        if not self.has_repeated:
            return error
        return Final.own(*TOO_LATE) if isinstance(error, TooLate) else Final(error.status, error.body, error.headers)


class Final(Failure):
    """What another pass may not be spent on: the work that a request may cause has been done."""

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
