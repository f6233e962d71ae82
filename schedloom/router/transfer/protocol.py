"""What every way of moving KV is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from schedloom.router.call import Call
from schedloom.router.failures import Failure
from schedloom.router.fleet import Target, Worker
from schedloom.router.relay import Outcome
from schedloom.router.reply import Reply
from schedloom.router.selection import Selection
from schedloom.router.upstream import TooLate

TOO_LATE = (504, "The Decoder could not be reached in time after the prefill.", "handoff_timeout")


@dataclass(slots=True)
class Passage:
    """One pass of a call through a Prefiller and a Decoder, both told the same ``request_id``; rather not through those
    in ``tried``, to which both are added.

    Both are chosen as late as a way allows, by what is known then. Where ``may_repeat``, a prefill that fails may be
    made once more, instead of a second pass.
    """

    call: Call
    reply: Reply
    decision: str
    request_id: str
    selection: Selection
    tried: list[Worker]
    decoder: Target | None = None
    may_repeat: bool = True
    has_repeated: bool = False

    def choose_prefiller(self) -> Target:
        """Raises Failure (503) when there is none."""
        source = self.selection.prefiller(self.call.prefill, self.tried)
        self.tried.append(source.worker)
        return source

    def choose_decoder(self) -> Target:
        """The one that was given, if any. Raises Failure (503) when there is none."""
        target = self.decoder or self.selection.decoder(self.call, self.tried)
        self.tried.append(target.worker)
        return target

    def repeat(self) -> bool:
        """Whether a prefill that failed may be made again; it then stands for a second pass."""
        self.may_repeat, self.has_repeated = False, self.may_repeat
        return self.has_repeated

    def last_word(self, error: Failure | TooLate) -> Failure | TooLate:
        """``error`` as it ends this pass."""
        if not self.has_repeated:
            return error
        return Final.own(*TOO_LATE) if isinstance(error, TooLate) else Final(error.status, error.body, error.headers)


@dataclass(slots=True)
class Resumption(Passage):
    """One pass to go on with what an engine handed back; ``tried`` is that engine."""

    may_repeat: bool = False

    def choose_decoder(self) -> Target:
        return self.selection.resumer(self.tried)


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
