"""Requests that are handed back and continued, on real schedulers, with a runner whose tokens tell what came before.

``TellingRunner`` is a fake: its next token is a hash of all tokens that the scheduler has of the request, so a token
that is lost, doubled or out of order changes all that follow. It writes no KV; the laboratory does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from schedloom.core.continuation import CONTINUABLE_KEY, RESUME_KEY, HandBack, Ticket
from schedloom.core.wire import PROTOCOL_VERSION
from tests.adapters.engine.harness import BLOCK, FakeRunner

MARK = {CONTINUABLE_KEY: PROTOCOL_VERSION}


def next_token(tokens: Sequence[int]) -> int:
    return hash(tuple(tokens)) % 500


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """What an undisturbed engine answers."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def request(
    name: str,
    prompt: list[int],
    max_tokens: int,
    *,
    ticket: Ticket | str | None = None,
    marked: bool = True,
    priority: int = 0,
    extra: dict[str, Any] | None = None,
    **parameters: Any,
) -> Request:
    init_none_hash(sha256)
    written = ticket.written() if isinstance(ticket, Ticket) else ticket
    args = {**(MARK if marked else {}), **({} if written is None else {RESUME_KEY: written}), **(extra or {})}
    sampling = {"ignore_eos": True, "temperature": 0, **parameters}
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens, extra_args=args or None, **sampling),
        pooling_params=None,
        priority=priority,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


class TellingRunner(FakeRunner):
    """Collects what each client gets, and what was handed back."""

    @classmethod
    def over(cls, runner: FakeRunner) -> TellingRunner:
        return cls(runner.scheduler, runner.depth == 2)

    def _sample(self, scheduled: Any, name: str) -> list[int]:
        if not super()._sample(scheduled, name):
            return []
        return [next_token(self.scheduler.requests[name]._all_token_ids)]

    def add(self, *arguments: Any, **more: Any) -> None:
        self.scheduler.add_request(request(*arguments, **more))

    def handed_back(self, name: str) -> HandBack | None:
        reason, stop = self.ended.get(name, ("", None))
        return HandBack.read(stop) if reason == "stop" else None

    def until_handed_back(self, *names: str, limit: int = 400) -> HandBack:
        for _ in range(limit):
            for name in names:
                if handed := self.handed_back(name):
                    return handed
            self.step()
        raise AssertionError(f"none of {names} was handed back in {limit} steps: {self.ended}")

    def decisions(self, hook: str) -> dict[tuple[str, str], int]:
        """Counts by verdict and reason."""
        counts = self.scheduler.decisions.counts
        return {(verdict, reason): count for (_, name, verdict, reason), count in counts.items() if name == hook}

    def leaks(self) -> list[str]:
        pool = self.scheduler.kv_cache_manager.block_pool
        wrong = [f"{len(self.scheduler.requests)} requests"] if self.scheduler.requests else []
        if pool.get_num_free_blocks() != pool.num_gpu_blocks - 1:
            wrong.append(f"{pool.get_num_free_blocks()} free blocks of {pool.num_gpu_blocks}")
        for books in ("_held", "_untold", "turned_away"):
            if getattr(self.scheduler, books, None):
                wrong.append(books)
        return wrong
