"""What every way of moving KV is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from schedloom.router.effort import Effort
from schedloom.router.failures import Failure
from schedloom.router.fleet.worker import Target
from schedloom.router.relay import Outcome
from schedloom.router.reply import Reply
from schedloom.router.requests.call import Call
from schedloom.router.selection import Selection


@dataclass(slots=True)
class Passage:
    """One pass of a call through a Prefiller and a Decoder, both told the same ``request_id``; a part of ``effort``.

    Both are chosen as late as a way allows, by what is known then. Where ``may_repeat``, a prefill that fails may be
    made once more, which ``on_repeat`` is told.
    """

    call: Call
    reply: Reply
    decision: str
    request_id: str
    selection: Selection
    effort: Effort
    decoder: Target | None = None
    may_repeat: bool = True
    on_repeat: Callable[[], None] | None = None

    def choose_prefiller(self, last: Target | None = None) -> Target:
        """Where there is none it is ``last`` again; without that, raises Failure (503)."""
        try:
            source = self.selection.prefiller(self.call.prefill, self.effort.doubts)
        except Failure:
            if last is None:
                raise
            source = last
        self.effort.asks(source.worker, prefills=True)
        return source

    def choose_decoder(self) -> Target:
        """The one that was given, if any and unless it drains meanwhile. Raises Failure (503) when there is none."""
        target = self.decoder
        if target is None or target.worker.drains:
            target = self.selection.decoder(self.call, self.effort.doubts)
        self.effort.asks(target.worker)
        return target

    def may_repeat_elsewhere(self, source: Target) -> bool:
        """Whether a prefill may be made again, and by others than ``source``."""
        return self.may_repeat and self.effort.left > 0 and self.selection.has_other_prefillers(source)

    def repeats(self) -> bool:
        """Whether a prefill that failed may be made again, which is then to be done."""
        if not self.may_repeat or self.effort.left < 1:
            return False
        self.may_repeat = False
        if self.on_repeat is not None:
            self.on_repeat()
        return True


@dataclass(slots=True)
class Resumption(Passage):
    """One pass to go on with what an engine, which is doubted, handed back."""

    may_repeat: bool = False

    def choose_decoder(self) -> Target:
        return self.selection.resumer(self.effort.doubts)


class Transfer(Protocol):
    """A way of moving KV, as the engines' connectors speak it."""

    async def serve(self, passage: Passage) -> Outcome:
        """Have both engines serve the call; the Decoder's answer is the client's.

        Raises Failure while the client has nothing yet, TooLate when the Decoder could not be reached while the
        Prefiller keeps the KV. Whatever happens, a client that leaves included, no engine keeps KV for nobody.
        """
        ...

    async def close(self) -> None: ...
