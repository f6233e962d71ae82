"""A request that an engine hands back to the router, and its way into the engine that continues it.

The engine ends the request with finish reason ``stop`` and a stop reason that holds all of its token ids. The router
has a Prefiller compute their KV, and sends a Decoder the client's own body with a ticket under ``RESUME_KEY``: the
Decoder takes the output so far as if it were prompt, and tells it again at the front of its first output, so that
parsers, usage and detokenization see one answer. The router passes on what its client does not have yet.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from schedloom.core.wire import PROTOCOL_VERSION

HANDED_BACK_PREFIX: Final = "schedloom:handed_back:"
"""Start of the ``stop_reason`` of a request that was handed back; the policy's reason, ``:`` and its tokens follow."""

CONTINUABLE_KEY: Final = "schedloom_continuable"
"""Key in ``vllm_xargs`` with value ``PROTOCOL_VERSION``: the router continues this request if it is handed back."""

RESUME_KEY: Final = "schedloom_resume"
"""Key in ``vllm_xargs`` of a continuation: a ``Ticket``, written by ``Ticket.written``."""

_TOKEN = "i"
_MAX_BYTES = 64 * 2**20


class BadTicket(ValueError):
    """A ticket or a stop reason that no engine or router of this protocol has written."""


def is_continuable(extra_args: dict[str, Any] | None) -> bool:
    return bool(extra_args) and extra_args.get(CONTINUABLE_KEY) == PROTOCOL_VERSION  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True)
class HandBack:
    """What an engine says of a request that it hands back: why, its prompt, and all output that it produced."""

    reason: str
    prompt: Sequence[int]
    output: Sequence[int]

    @property
    def stop_reason(self) -> str:
        return f"{HANDED_BACK_PREFIX}{self.reason}:{_packed(self.prompt)}.{_packed(self.output)}"

    @property
    def ticket(self) -> Ticket:
        return Ticket(digest(self.prompt), self.output)

    @classmethod
    def read(cls, stop_reason: object) -> HandBack | None:
        """``None`` for any other stop reason. Raises BadTicket for one that is damaged."""
        if not isinstance(stop_reason, str) or not stop_reason.startswith(HANDED_BACK_PREFIX):
            return None
        reason, _, tokens = stop_reason[len(HANDED_BACK_PREFIX) :].partition(":")
        prompt, _, output = tokens.partition(".")
        return cls(reason, _unpacked(prompt), _unpacked(output))


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where a continuation begins: after ``output``, behind a prompt with this ``digest``."""

    prompt_digest: str
    output: Sequence[int]

    def written(self) -> str:
        return f"{self.prompt_digest}.{_packed(self.output)}"

    @classmethod
    def read(cls, value: object) -> Ticket:
        """Raises BadTicket for anything that ``written`` does not write."""
        if not isinstance(value, str):
            raise BadTicket(f"a ticket is a string, not {type(value).__name__}")
        prompt_digest, _, output = value.partition(".")
        return cls(prompt_digest, _unpacked(output))


def digest(token_ids: Sequence[int]) -> str:
    """A fingerprint of token ids, to tell whether two engines read the same prompt out of one body."""
    return hashlib.sha256(array(_TOKEN, token_ids).tobytes()).hexdigest()


def _packed(token_ids: Sequence[int]) -> str:
    return base64.urlsafe_b64encode(zlib.compress(array(_TOKEN, token_ids).tobytes(), 1)).decode()


def _unpacked(text: str) -> Sequence[int]:
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(base64.b64decode(text, altchars=b"-_", validate=True), _MAX_BYTES)
        if not unpacker.eof:
            raise BadTicket("token ids are cut short")
        return tuple(array(_TOKEN, content))
    except (binascii.Error, zlib.error, ValueError) as error:
        raise BadTicket(f"token ids cannot be read: {error}") from error
