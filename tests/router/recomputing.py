"""A fake Decoder with the recompute policy: it hands marked requests back, and continues others' by replay.

Its tokens are single bytes, so that characters are split across tokens, events and hand-backs, and its detokenizer
flushes what is incomplete at every end, as real ones do.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from schedloom.core.continuation import CONTINUABLE_KEY, RESUME_KEY, BadTicket, HandBack, Ticket, digest
from schedloom.core.wire import REJECTION_PREFIX, Role
from tests.router.fakes import MODEL, Answer, FakeEngine, Seen, contract

PROMPT = (101, 102, 103, 104, 105, 106, 107)
TEXT = "Grüße aus Zürich, 🦜!"
TOKENS = tuple(TEXT.encode())


@dataclass
class RecomputingDecoder(FakeEngine):
    """``gives_back`` says after how many tokens in all each of the next marked requests is handed back;
    ``at_once`` sends streams in one piece.
    """

    gives_back: list[int] = field(default_factory=list)
    at_once: bool = False

    def _ordinary(self, seen: Seen) -> Answer:
        if seen.is_local_attempt and not self.holds:
            return self._rejection(seen)
        extra = seen.body.get("vllm_xargs") or {}
        try:
            told = Ticket.read(extra[RESUME_KEY]) if RESUME_KEY in extra else Ticket(digest(PROMPT), ())
        except BadTicket:
            return self._refused(seen, "bad_ticket")
        if told.prompt_digest != digest(PROMPT) or tuple(told.output) != TOKENS[: len(told.output)]:
            return self._refused(seen, "prompt_differs")
        if extra.get(CONTINUABLE_KEY) == 1 and self.gives_back:
            left = max(self.gives_back.pop(0), len(told.output))
            return self._said(seen, len(told.output), left, HandBack("preempted", PROMPT, TOKENS[:left]).stop_reason)
        return self._said(seen, len(told.output), len(TOKENS), None)

    def _refused(self, seen: Seen, reason: str) -> Answer:
        return self._said(seen, 0, 0, REJECTION_PREFIX + reason)

    def _said(self, seen: Seen, told: int, end: int, stop_reason: str | None) -> Answer:
        """Tokens up to ``end``, the first ``told`` of them in one output together with the one behind them."""
        finish = "length" if stop_reason is None else "stop"
        if not seen.body.get("stream"):
            return Answer.of(self._whole_answer(seen, TOKENS[:end], finish, stop_reason))
        first = min(told + 1, end)
        ends = [first, *range(first + 1, end + 1)] if end else []
        chunks = self._stream_chunks(seen, ends, finish, stop_reason)
        usage = self._usage(seen, end)
        answer = Answer.stream(*chunks, *usage, "[DONE]")
        if self.at_once:
            answer.steps = [b"".join(step for step in answer.steps if isinstance(step, bytes))]
        return answer

    def _stream_chunks(self, seen: Seen, ends: list[int], finish: str, stop_reason: str | None) -> list[dict[str, Any]]:
        """Real engines drop the last chunk of a stream without tokens, and send the end of others by itself or not."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        begins = [0, *ends]
        chunks = self._first_chunks(seen)
        for begin, end in zip(begins, ends, strict=False):
            tokens = TOKENS[begin:end]
            chunks.append(self._token_chunk(seen, decoder.decode(bytes(tokens)), tokens, begin == 0))
        if ends:
            last = self._token_chunk(seen, decoder.decode(b"", True), (), False)
            last["choices"][0].update(finish_reason=finish, stop_reason=stop_reason)
            chunks.append(last)
        return chunks

    def _first_chunks(self, seen: Seen) -> list[Any]:
        chunks = self._role(seen)
        if chunks and seen.body.get("return_token_ids"):
            chunks[0]["prompt_token_ids"] = list(PROMPT)
        return chunks

    def _token_chunk(self, seen: Seen, text: str, tokens: Sequence[int], first: bool) -> dict[str, Any]:
        is_chat = "chat" in seen.path
        chunk = self._chunk(seen, **({"delta": {"content": text}} if is_chat else {"text": text}))
        if seen.body.get("return_token_ids"):
            chunk["choices"][0]["token_ids"] = list(tokens)
            if not is_chat:
                chunk["choices"][0]["prompt_token_ids"] = list(PROMPT) if first else None
        return chunk

    def _whole_answer(self, seen: Seen, tokens: Sequence[int], finish: str, stop_reason: str | None) -> dict[str, Any]:
        answer = self._whole(seen, len(tokens), finish, stop_reason)
        text = bytes(tokens).decode(errors="replace")
        (choice,) = answer["choices"]
        if "message" in choice:
            choice["message"]["content"] = text
        else:
            choice["text"] = text
        if seen.body.get("return_token_ids"):
            choice["token_ids"] = list(tokens)
        return answer


def recomputing(number: int = 0, *gives_back: int, **changes: Any) -> RecomputingDecoder:
    promised = contract(Role.CONSUMER, features=["append_prefill", "recompute"], models=[MODEL], **changes)
    return RecomputingDecoder(f"http://d{number}:1", promised, gives_back=list(gives_back))
