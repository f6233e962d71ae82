"""What a client does and sees: one streamed turn through the official OpenAI client."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from schedloom.core.wire import DECISION_HEADER
from schedloom.demo.conversation import Message, Session

ANSWER_TOKENS = 24
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class Answer:
    """``prompt_tokens`` is the engine's count; ``ttft_seconds`` is from sending to the first content."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    ttft_seconds: float
    decision: str


class Client:
    """Asks one OpenAI-compatible server, greedily."""

    def __init__(self, url: str) -> None:
        from openai import OpenAI

        self._openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_SECONDS)

    def ask(self, session: Session, answer_tokens: int = ANSWER_TOKENS) -> Answer:
        """One turn of ``session``, with its key where the session says."""
        headers = {"X-Session-ID": session.name} if session.key == "header" else {}
        body = {"conversation_id": session.name} if session.key == "body" else {}
        return self.stream(session.messages, headers, body, answer_tokens)

    def stream(
        self,
        messages: list[Message],
        headers: dict[str, str],
        body: dict[str, Any],
        answer_tokens: int = ANSWER_TOKENS,
    ) -> Answer:
        started = time.perf_counter()
        create: Any = self._openai.chat.completions.with_raw_response.create
        response = create(
            model="demo",
            messages=messages,
            max_tokens=answer_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers=headers,
            extra_body={"return_token_ids": True, **body},
        )
        return _collect(response, started)


def _collect(response: Any, started: float) -> Answer:
    text, prompt_tokens, first = "", 0, None
    token_ids: list[int] = []
    for chunk in response.parse():
        if chunk.usage:
            prompt_tokens = chunk.usage.prompt_tokens
        for choice in chunk.choices:
            token_ids += getattr(choice, "token_ids", None) or []
            if choice.delta.content:
                first = first or time.perf_counter()
                text += choice.delta.content
    if first is None:
        raise RuntimeError("a stream ended without content")
    return Answer(text, token_ids, prompt_tokens, first - started, response.headers.get(DECISION_HEADER, ""))
