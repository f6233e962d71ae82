"""The truth about every request: what it was asked, what it must answer, what it answered, and how it ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from schedloom.conformance.chain import Chain
from schedloom.conformance.laboratory import Order, Output
from schedloom.core.continuation import HandBack
from schedloom.core.wire import REJECTION_PREFIX

Accuse = Callable[[str, str], None]

ABORTED = "aborted"
REJECTED = "rejected"
ERROR = "error"


@dataclass(slots=True)
class Entry:
    """One request. ``state`` is the model's state behind its last token, prompt or emitted.

    ``name`` is the engine's for it now: what is handed back comes again under another, and the ``length`` that it comes
    with counts what its client has as well. ``reset`` and ``alone`` are of its last preemption; ``retells``: its next
    output begins with what its client has.
    """

    order: Order
    state: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    outcome: str | None = None
    held: bool = False
    counted: bool = False
    preempted: bool = False
    transfer_failed: bool = False
    overtaken: int = 0
    name: str = ""
    length: int = 0
    reset: bool = False
    alone: bool = False
    retells: bool = False
    times_returned: int = 0


class Ledger:
    """Holds an engine's outputs against the truth, and accuses by the id of the invariant that was broken."""

    def __init__(self, chain: Chain, max_model_len: int, accuse: Accuse) -> None:
        self._chain = chain
        self._max_model_len = max_model_len
        self._accuse = accuse
        self.entries: dict[str, Entry] = {}
        self.open: dict[str, Entry] = {}
        self.rejections: dict[str, str] = {}
        self.returned: list[tuple[Entry, HandBack]] = []
        self.hand_backs: Counter[str] = Counter()

    def enter(self, order: Order) -> Entry:
        state = self._chain.extend(self._chain.start_of(order.salt, order.adapter), 0, order.prompt)
        limit = min(order.max_tokens, self._max_model_len - len(order.prompt))
        entry = Entry(order, state, limit, name=order.request_id, length=len(order.prompt))
        self.entries[order.request_id] = self.open[order.request_id] = entry
        return entry

    def enter_again(self, entry: Entry, order: Order) -> None:
        """``entry`` was handed back, and comes to the engine as ``order``."""
        self.entries[order.request_id] = entry
        entry.name, entry.retells = order.request_id, bool(entry.tokens)
        entry.length = len(order.prompt) + len(entry.tokens)
        entry.preempted = entry.held = False
        entry.overtaken = 0
        first = entry.order.request_id
        entry.order = replace(entry.order, marked=False, arrival=order.arrival, transfer=order.transfer)
        self.open[first] = self.open.pop(first)

    def close(self, entry: Entry, outcome: str) -> None:
        entry.outcome = outcome
        self.open.pop(entry.order.request_id, None)

    def deliver(self, output: Output) -> None:
        entry = self.entries.get(output.request_id)
        if entry is None or entry.outcome is not None or entry.name != output.request_id:
            ended = "never came" if entry is None else f"was {entry.outcome or 'handed back'}"
            return self._accuse("OUT-1", f"output for {output.request_id}, which {ended}")
        for token in self._new_tokens(entry, output.tokens):
            self._take(entry, token, output.read if token is output.tokens[-1] else None)
        if output.finish_reason is not None:
            self._end(entry, output)
        return None

    def _new_tokens(self, entry: Entry, tokens: list[int]) -> list[int]:
        if not entry.retells or not tokens:
            return tokens
        entry.retells = False
        known = len(entry.tokens)
        if tokens[:known] != entry.tokens:
            self._accuse("RET-2", f"{entry.name} did not tell again the {known} tokens that its client has")
        return tokens[known:]

    def _take(self, entry: Entry, token: int, read: int | None) -> None:
        name = entry.order.request_id
        if read is not None and read != entry.state:
            self._accuse("KV-3", f"{name} read KV of another prefix before token {len(entry.tokens)}")
        if token != self._chain.next_token(entry.state):
            self._accuse("TOK-1", f"{name} emitted {token} as token {len(entry.tokens)}")
            self._explain(entry, token)
        position = len(entry.order.prompt) + len(entry.tokens)
        entry.state = self._chain.extend(entry.state, position, (token,))
        entry.tokens.append(token)
        if len(entry.tokens) > entry.limit:
            self._accuse("OUT-2", f"{name} emitted more than {entry.limit} tokens")

    def _explain(self, entry: Entry, token: int) -> None:
        """A token that stands elsewhere in the right answer was repeated or dropped, not computed wrongly."""
        name = entry.order.request_id
        following = self._chain.next_token(
            self._chain.extend(
                entry.state,
                len(entry.order.prompt) + len(entry.tokens),
                (self._chain.next_token(entry.state),),
            )
        )
        if token == following:
            self._accuse("OUT-2", f"{name} lost a token before token {len(entry.tokens)}")
        if token in entry.tokens:
            self._accuse("OUT-2", f"{name} repeated token {entry.tokens.index(token)}")
            if token == entry.tokens[0]:
                self._accuse("OUT-3", f"{name} started over after {len(entry.tokens)} tokens")

    def _end(self, entry: Entry, output: Output) -> None:
        stop_reason = output.stop_reason
        if isinstance(stop_reason, str) and stop_reason.startswith(REJECTION_PREFIX):
            self._end_rejected(entry, stop_reason.removeprefix(REJECTION_PREFIX))
        elif handed := HandBack.read(stop_reason):
            self._hand_back(entry, handed)
        elif output.finish_reason == ERROR:
            if not entry.transfer_failed:
                self._accuse("OUT-1", f"{entry.order.request_id} ended in an error without a cause")
            self.close(entry, ERROR)
        else:
            self._end_answered(entry, output.finish_reason or "")

    def _end_answered(self, entry: Entry, reason: str) -> None:
        name = entry.order.request_id
        if len(entry.tokens) != entry.limit:
            self._accuse("OUT-2", f"{name} ended ({reason}) with {len(entry.tokens)} of {entry.limit} tokens")
        if reason != "length":
            self._accuse("OUT-1", f"{name} ended with {reason!r} instead of 'length'")
        self.close(entry, reason)

    def _hand_back(self, entry: Entry, handed: HandBack) -> None:
        order = entry.order
        wrongs = {
            "though nobody marked it": not order.continuable,
            "though its tokens are drawn from a seed": order.seeded,
            "without output": not entry.tokens,
            "although no other held KV": entry.alone,
            "by a reset": entry.reset,
        }
        for wrong in (what for what, is_so in wrongs.items() if is_so):
            self._accuse("RET-1", f"{entry.name} was handed back {wrong}")
        if list(handed.prompt) != order.prompt:
            self._accuse("RET-2", f"the hand-back of {entry.name} names another prompt than its client's")
        if list(handed.output) != entry.tokens:
            lengths = f"{len(handed.output)} tokens where its client has {len(entry.tokens)}"
            self._accuse("RET-2", f"the hand-back of {entry.name} names {lengths}")
        entry.times_returned += 1
        self.hand_backs[entry.name] += 1
        self.returned.append((entry, handed))

    def _end_rejected(self, entry: Entry, reason: str) -> None:
        name = entry.order.request_id
        if entry.tokens:
            self._accuse("OUT-3", f"{name} was rejected after {len(entry.tokens)} tokens")
            self._accuse("REJ-1", f"{name} was rejected after output")
        if not entry.order.marked:
            self._accuse("REJ-1", f"{name} was rejected though it is no local attempt")
        if entry.held:
            self._accuse("REJ-1", f"{name} was rejected after it had been given KV blocks")
        if entry.counted:
            self._accuse("REJ-1", f"{name} was rejected and is counted in the cache's statistics")
        self.rejections[name] = reason
        self.close(entry, REJECTED)
