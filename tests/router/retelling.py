"""One answer, told in many ways: cut into chunks at random, and put together again as a client does."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from schedloom.router.sse import data_of, parsed, split_events

TEXTS = {
    "reasoning": 'Let me look. Ünïcode 🦜 and "schedloom:handed_back:x" too.',
    "content": "The answer is 42, naturally.\nschedloom:handed_back:",
}
TOKEN_IDS = list(range(1000, 1040))
TOOLS = [("get_weather", '{"city": "Zürich"}'), ("get_time", "{}")]


def event(value: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(value).encode()


@dataclass
class Assembled:
    """What a client makes of a stream of chat chunks."""

    heads: set[tuple[Any, Any]] = field(default_factory=set)
    roles: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    tools: dict[int, dict[str, str]] = field(default_factory=dict)
    finishes: list[str] = field(default_factory=list)

    def add(self, events: bytes) -> Assembled:
        for one in split_events(events):
            chunk = parsed(data_of(one) or b"")
            if "choices" in chunk:
                self._add_chunk(chunk)
        return self

    def _add_chunk(self, chunk: dict[str, Any]) -> None:
        self.heads.add((chunk["id"], chunk["created"]))
        if chunk.get("prompt_token_ids"):
            self.prompts.append(chunk["prompt_token_ids"])
        for choice in chunk["choices"]:
            self.token_ids += choice.get("token_ids") or []
            if choice["finish_reason"] is not None:
                self.finishes.append(choice["finish_reason"])
            self._add_delta(dict(choice["delta"]))

    def _add_delta(self, delta: dict[str, Any]) -> None:
        for call in delta.pop("tool_calls", ()):
            tool = self.tools.setdefault(call["index"], {"name": "", "arguments": ""})
            tool.update({key: call[key] for key in ("id", "type") if key in call})
            for key, value in call.get("function", {}).items():
                tool[key] += value
        if "role" in delta:
            self.roles.append(delta.pop("role"))
        for key, value in delta.items():
            self.texts[key] = self.texts.get(key, "") + value


def chunk(name: str, delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    head = {"id": f"chatcmpl-{name}", "object": "chat.completion.chunk", "created": len(name), "model": "m"}
    own = {key: more.pop(key) for key in ("prompt_token_ids",) if key in more}
    return head | own | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish} | more]}


def deltas(name: str, random: random.Random) -> list[dict[str, Any]]:
    """The whole answer in order, cut anew; ids of tool calls are made anew as well."""
    told: list[dict[str, Any]] = []
    for key, text in TEXTS.items():
        told += [{key: piece} for piece in pieces(text, random)]
    for index, (tool, arguments) in enumerate(TOOLS):
        head = {"index": index, "id": f"{name}-{index}", "type": "function"}
        cuts = pieces(arguments, random)
        first = cuts.pop(0) if random.random() < 0.5 else ""
        told.append({"tool_calls": [head | {"function": {"name": tool, "arguments": first}}]})
        told += [{"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in cuts]
    return told


def pieces(text: str, random: random.Random) -> list[str]:
    size = random.choice([1, 3, 8, 100])
    return [text[begin : begin + size] for begin in range(0, len(text), size)]


def stream(name: str, random: random.Random) -> list[bytes]:
    """Events of a whole stream under one id, token ids spread over its chunks."""
    told = deltas(name, random)
    ids = TOKEN_IDS
    bounds = sorted(random.choices(range(len(ids) + 1), k=len(told) - 1))
    spans = zip([0, *bounds], [*bounds, len(ids)], strict=True)
    chunks = [chunk(name, {"role": "assistant", "content": ""}, prompt_token_ids=[1, 2, 3])]
    chunks += [chunk(name, delta, token_ids=ids[a:b]) for delta, (a, b) in zip(told, spans, strict=True)]
    chunks += [chunk(name, {}, "tool_calls", token_ids=[])]
    return [*map(event, chunks), b"data: [DONE]\n\n"]
