"""Agentic sessions: a long first prompt, short answers in the manner of tool calls, the whole history in every turn."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

Message = dict[str, str]
SessionKey = Literal["header", "body", "none"]

FIRST_PROMPT_CHARACTERS = 2400
TOOL_RESULT_CHARACTERS = 90

_WORDS = (
    *("account", "queue", "parser", "ledger", "shard", "router", "token", "cache", "block", "lease", "page", "index"),
    *("commit", "merge", "branch", "build", "test", "deploy", "alert", "metric", "trace", "span", "field", "record"),
    *("schema", "table", "column", "cursor", "batch", "worker", "retry", "timeout", "budget", "limit", "owner"),
)


@dataclass
class Session:
    """One conversation. ``key`` is how the client tells the router which session a request belongs to."""

    name: str
    key: SessionKey
    messages: list[Message] = field(default_factory=list)

    @classmethod
    def opened(cls, name: str, key: SessionKey, characters: int = FIRST_PROMPT_CHARACTERS) -> Session:
        task = f"Session {name}. You may call one tool at a time. The repository reads:\n"
        return cls(name, key, [{"role": "user", "content": task + _prose(name, characters)}])

    def continue_with(self, answer: str, turn: int) -> None:
        """Append what the model said and what its tool returned."""
        self.messages.append({"role": "assistant", "content": answer})
        result = f"Result of call {turn}: " + _prose(f"{self.name} {turn}", TOOL_RESULT_CHARACTERS)
        self.messages.append({"role": "user", "content": result})


def _prose(seed: str, characters: int) -> str:
    source = random.Random(seed)
    words: list[str] = []
    while sum(map(len, words)) + len(words) < characters:
        words.append(source.choice(_WORDS))
    return " ".join(words)
