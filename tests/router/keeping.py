"""Fake engines that move KV in both directions, and know by which tokens: a token is a byte of the conversation."""

from __future__ import annotations

import asyncio
from typing import Any

from schedloom.core.wire import Role
from tests.router.fakes import Answer, FakeEngine, Seen, contract

BIDIRECTIONAL: dict[str, Any] = {
    "kv_connectors": ["NixlConnector"],
    "bidirectional_kv": True,
    "kv_pinned_seconds": 480.0,
    "engine_version": "0.33.0",
}


def tokens_of(body: dict[str, Any]) -> list[int]:
    if "messages" in body:
        said = "".join(f"<{one['role']}>{_text(one['content'])}" for one in body["messages"])
        return list(f"{said}<assistant>".encode())
    prompt = body["prompt"]
    return list(prompt.encode()) if isinstance(prompt, str) else prompt


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "?") for part in content)


class Fleet:
    """One of each, and the KV that the Decoder keeps: tokens by the number of their turn."""

    def __init__(self, **changes: Any) -> None:
        self.kept: dict[int, list[int]] = {}
        self.pulled: list[int] = []
        self.wrongs: list[str] = []
        self.p = PullingPrefiller(self, BIDIRECTIONAL | changes)
        self.d = KeepingDecoder(self, BIDIRECTIONAL | changes)


class PullingPrefiller(FakeEngine):
    def __init__(self, fleet: Fleet, changes: dict[str, Any]) -> None:
        super().__init__("http://p:1", contract(Role.PRODUCER, **changes))
        self.fleet = fleet

    def _ordinary(self, seen: Seen) -> Answer:
        parameters, tokens = seen.body["kv_transfer_params"], tokens_of(seen.body)
        number = parameters["remote_block_ids"]
        if number is not None:
            count, number = parameters["remote_num_tokens"], number[0][0]
            if self.fleet.kept.pop(number)[:count] != tokens[:count]:
                self.fleet.wrongs.append("the Prefiller took KV of other tokens for its prompt's")
            self.fleet.pulled.append(count)
        return super()._ordinary(seen)


class KeepingDecoder(FakeEngine):
    """``output`` is what it says; it tells of what it keeps only where it was given transfer parameters."""

    def __init__(self, fleet: Fleet, changes: dict[str, Any], origin: str = "http://d:1") -> None:
        super().__init__(origin, contract(Role.CONSUMER, **changes))
        self.fleet = fleet
        self.output = " word word word"
        self.tokenized = 0

    async def answer(self, seen: Seen) -> Answer:
        if seen.path == "/tokenize":
            self.tokenized += 1
            await asyncio.sleep(0)
            return Answer.of({"tokens": tokens_of(seen.body), "count": 0, "max_model_len": 99})
        return await super().answer(seen)

    def _ordinary(self, seen: Seen) -> Answer:
        if seen.is_local_attempt and not self.holds:
            return self._rejection(seen)
        prompt, output = tokens_of(seen.body), list(self.output.encode())
        told = self._keep([*prompt, *output]) if seen.body.get("kv_transfer_params") else None
        ids = bool(seen.body.get("return_token_ids"))
        if seen.body.get("stream"):
            return self._streamed(seen, prompt, output, told, ids)
        answer = self._whole(seen, 3) | {"kv_transfer_params": told}
        answer["prompt_token_ids"] = prompt if ids else None
        answer["choices"][0]["token_ids"] = output if ids else None
        return Answer.of(answer)

    def _streamed(self, seen: Seen, prompt: list[int], output: list[int], told: Any, ids: bool) -> Answer:
        *first, last, done = self._chunks(seen)
        if ids:
            first[0]["prompt_token_ids"] = prompt
            for place, chunk in enumerate(first):
                chunk["choices"][0]["token_ids"] = output[place :: len(first)] if place == -1 else []
            first[-1]["choices"][0]["token_ids"] = output
        last["kv_transfer_params"] = told
        return Answer.stream(*first, last, done)

    def _keep(self, tokens: list[int]) -> dict[str, Any]:
        number = len(self.seen)
        self.fleet.kept[number] = tokens
        return {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [[number]],
            "remote_engine_id": "d",
            "remote_request_id": f"r{number}",
            "remote_host": "10.0.0.8",
            "remote_port": 5600,
            "remote_num_tokens": len(tokens) - 1,
            "tp_size": 1,
        }
