"""A Prefiller that pulls what the session's Decoder kept of the turn before, instead of computing it again.

A Prefiller takes whatever KV the parameters name for the KV of its prompt, without any check. So they are relayed only
after it has been proved on token ids that the new prompt goes on where that turn ended.
"""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from schedloom.core.routing import SessionOwner
from schedloom.router.failures import Failure
from schedloom.router.fleet.breaker import Clock
from schedloom.router.fleet.fleet import Fleet
from schedloom.router.fleet.worker import Target, Worker
from schedloom.router.requests.body import are_token_ids
from schedloom.router.requests.call import Call
from schedloom.router.sessions.store import SessionKey
from schedloom.router.tokens import Tokens
from schedloom.router.transfer.parameters import Parameters
from schedloom.router.transfer.terms import Terms
from schedloom.router.transfer.turn import Turn

_Told = TypeVar("_Told")

STREAMS_TELL_SINCE: Final = (0, 33)
"""Before this version vLLM's streams do not say where KV is kept, so that nothing is remembered of them."""

_SHAPE_PROMPTS = (
    *("documents", "reasoning_effort", "suffix", "truncate_prompt_tokens", "truncation_side"),
    *("mm_processor_kwargs", "media_io_kwargs"),
)
"""What shapes a prompt, and is not said to an engine that tokenizes one."""


@dataclass(frozen=True, slots=True)
class KeptKv:
    """What a Decoder keeps of a turn: its first ``count`` tokens, by their digest, until ``expires_at``."""

    parameters: Parameters
    count: int
    digest: bytes
    owner: SessionOwner
    expires_at: float

    def begins(self, tokens: Sequence[int]) -> bool:
        """Whether a prompt goes on where this ends."""
        return len(tokens) > self.count and _digest(tokens[: self.count]) == self.digest


@dataclass(frozen=True, slots=True)
class Loan:
    """The parameters by which a Prefiller pulls KV, and whose it is."""

    parameters: Parameters
    lender: Worker

    async def during(self, prefill: Awaitable[_Told]) -> _Told:
        """As long as it is pulled, the lender is not done."""
        self.lender.lends += 1
        try:
            return await prefill
        finally:
            self.lender.lends -= 1


class PullBack:
    """Remembers at most ``capacity`` sessions' last turns, each until its KV is fetched or about to expire."""

    def __init__(
        self, fleet: Fleet, tokens: Tokens, terms: Terms, clock: Clock, capacity: int, margin_seconds: float
    ) -> None:
        self._fleet = fleet
        self._terms = terms
        self._tokens = tokens
        self._clock = clock
        self._capacity = capacity
        self._margin_seconds = margin_seconds
        self._kept: OrderedDict[SessionKey, KeptKv] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def turn(self, call: Call, target: Target) -> Turn | None:
        """To be filled from the Decoder's answer, where something can be remembered of it."""
        if call.key is None or call.resumes or target.contract.kv_pinned_seconds is None:
            return None
        if call.body.streaming and not _streams_tell(target.contract.engine_version):
            return None
        asked = call.body.fields.get("return_token_ids")
        return Turn(asked=bool(asked)) if asked in (None, True) and _is_text(call) else None

    def remember(self, call: Call, target: Target, turn: Turn) -> None:
        """What the Decoder tells against the terms is forgotten: its answer is the client's by now."""
        tokens = turn.tokens
        if not (turn.parameters and are_token_ids(tokens)):
            return
        with contextlib.suppress(Failure):
            self._remember(call, target, self._terms.checked(turn.parameters, target), tokens)

    def _remember(self, call: Call, target: Target, parameters: Parameters, tokens: Sequence[int]) -> None:
        count = parameters.get("remote_num_tokens")
        pinned = target.contract.kv_pinned_seconds
        if call.key is None or pinned is None or not isinstance(count, int) or not 0 < count <= len(tokens):
            return
        expires_at = self._clock() + pinned - self._margin_seconds
        self._kept[call.key] = KeptKv(parameters, count, _digest(tokens[:count]), target.owner, expires_at)
        self._kept.move_to_end(call.key)
        while len(self._kept) > self._capacity:
            self._kept.popitem(last=False)

    async def recall(self, call: Call, source: Target) -> Loan | None:
        """How a Prefiller pulls what is kept; given once, for what was fetched is kept no longer."""
        if call.key is None or not source.contract.bidirectional_kv or call.key not in self._kept:
            return None
        kept = self._kept[call.key]
        if self._clock() >= kept.expires_at or self._fleet.lender(kept.owner) is None:
            del self._kept[call.key]
            return None
        if not _is_text(call):
            return None
        tokens = call.token_ids or await self._tokens.of(call)
        if tokens is None or not kept.begins(tokens) or self._kept.get(call.key) is not kept:
            return None
        del self._kept[call.key]
        lender = self._fleet.lender(kept.owner)
        return None if lender is None else Loan(kept.parameters, lender)


def _digest(tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(array("Q", tokens).tobytes()).digest()


def _is_text(call: Call) -> bool:
    """Whether equal token ids mean equal KV, and an engine that tokenizes the prompt makes the same of it."""
    fields = call.body.fields
    if fields.get("tool_choice") == "none" or any(fields.get(key) is not None for key in _SHAPE_PROMPTS):
        return False
    return all(map(_is_text_message, fields.get("messages") or ()))


def _is_text_message(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else message
    parts = content if isinstance(content, list) else [content]
    return all(part is None or isinstance(part, str) or _is_text_part(part) for part in parts)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def _streams_tell(version: str | None) -> bool:
    numbers = (version or "").split(".")[:2]
    return all(number.isdigit() for number in numbers) and tuple(map(int, numbers)) >= STREAMS_TELL_SINCE
