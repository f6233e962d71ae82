"""Fake engines: what a real one would say, from memory or over sockets, with faults on demand."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from schedloom.core.wire import CONTRACT_PATH, LOCAL_ATTEMPT_KEY, REJECTION_PREFIX, EngineContract, Role
from schedloom.router.http.upstream import BrokenOff, ConnectFailed, TooLate, UpstreamRequest, UpstreamResponse

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
MODEL = "fake-model"

Step = bytes | Exception | asyncio.Event


@dataclass
class Answer:
    """What an engine answers. A step is a chunk, an error in its place, or an event to wait for."""

    status: int = 200
    kind: bytes = JSON
    steps: Sequence[Step] = ()
    headers: Sequence[tuple[bytes, bytes]] = ()

    @classmethod
    def of(cls, value: Any, status: int = 200, **more: Any) -> Answer:
        return cls(status, JSON, [json.dumps(value).encode()], **more)

    @classmethod
    def error(cls, status: int, message: str = "no", **more: Any) -> Answer:
        return cls.of({"error": {"message": message, "type": "Fake", "param": None, "code": status}}, status, **more)

    @classmethod
    def stream(cls, *events: Any) -> Answer:
        return cls(200, EVENTS, [event_bytes(event) for event in events])


def event_bytes(event: Any) -> Step:
    if isinstance(event, (Exception, asyncio.Event)):
        return event
    return b"data: " + (event.encode() if isinstance(event, str) else json.dumps(event).encode()) + b"\n\n"


def transfer_parameters(engine: str = "p0") -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine,
        "remote_block_ids": [1, 2, 3],
        "remote_host": "10.0.0.7",
        "remote_port": 5557,
        "tp_size": 1,
    }


@dataclass
class Seen:
    """A request that reached a fake engine."""

    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.raw)
        return parsed

    @property
    def is_local_attempt(self) -> bool:
        return (self.body.get("vllm_xargs") or {}).get(LOCAL_ATTEMPT_KEY) == 1


@dataclass
class FakeEngine:
    """An engine that generates ``tokens`` words. ``holds`` tells whether it has a usable prefix for local
    attempts.

    ``script`` answers the next generation requests instead; ``finish_chunk`` is false for engines that drop
    the finish chunk of a stream without tokens.
    """

    origin: str
    contract: EngineContract | None
    tokens: int = 3
    holds: bool = True
    finish_chunk: bool = False
    script: list[Answer | Callable[[Seen], Awaitable[Answer]]] = field(default_factory=list)
    always: Answer | None = None
    reachable: bool = True
    seen: list[Seen] = field(default_factory=list)
    open: int = 0
    cancelled: int = 0
    _ids: Any = field(default_factory=itertools.count)

    async def answer(self, seen: Seen) -> Answer:
        if seen.path == CONTRACT_PATH:
            return Answer.error(404) if self.contract is None else Answer.of(self.contract.model_dump(mode="json"))
        if seen.path == "/health":
            return Answer()
        self.seen.append(seen)
        if self.script:
            scripted = self.script.pop(0)
            return scripted if isinstance(scripted, Answer) else await scripted(seen)
        return self.always or self._ordinary(seen)

    def _ordinary(self, seen: Seen) -> Answer:
        body = seen.body
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            return Answer.of(self._whole(seen, 1) | {"kv_transfer_params": transfer_parameters()})
        if seen.is_local_attempt and not self.holds:
            return self._rejection(seen)
        if body.get("stream"):
            return Answer.stream(*self._chunks(seen))
        return Answer.of(self._whole(seen, self.tokens))

    def _id(self, seen: Seen) -> str:
        return f"chatcmpl-{seen.headers.get('x-request-id', next(self._ids))}"

    def _whole(self, seen: Seen, tokens: int, reason: str = "length", stop_reason: str | None = None) -> dict[str, Any]:
        text = " word" * tokens
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "stop_reason": stop_reason}
        if "chat" in seen.path:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        usage = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
        kind = "chat.completion" if "chat" in seen.path else "text_completion"
        return {
            "id": self._id(seen),
            "object": kind,
            "created": 1,
            "model": MODEL,
            "choices": [choice],
            "usage": usage,
        }

    def _chunk(self, seen: Seen, **choice: Any) -> dict[str, Any]:
        kind = "chat.completion.chunk" if "chat" in seen.path else "text_completion"
        head = {"id": self._id(seen), "object": kind, "created": 1, "model": MODEL}
        return head | {"choices": [{"index": 0, "finish_reason": None} | choice]}

    def _role(self, seen: Seen) -> list[Any]:
        return [self._chunk(seen, delta={"role": "assistant", "content": ""})] if "chat" in seen.path else []

    def _usage(self, seen: Seen, tokens: int) -> list[Any]:
        if not (seen.body.get("stream_options") or {}).get("include_usage"):
            return []
        usage = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
        return [self._chunk(seen) | {"choices": [], "usage": usage}]

    def _chunks(self, seen: Seen) -> list[Any]:
        said = {"delta": {"content": " word"}} if "chat" in seen.path else {"text": " word"}
        last: dict[str, Any] = {"delta": {}} if "chat" in seen.path else {"text": ""}
        words = [self._chunk(seen, **said) for _ in range(self.tokens)]
        end = [self._chunk(seen, **last) | {"choices": [{"index": 0, **last, "finish_reason": "length"}]}]
        return [*self._role(seen), *words, *end, *self._usage(seen, self.tokens), "[DONE]"]

    def _rejection(self, seen: Seen) -> Answer:
        stop_reason = REJECTION_PREFIX + "no_usable_prefix"
        if not seen.body.get("stream"):
            return Answer.of(self._whole(seen, 0, "stop", stop_reason))
        said: dict[str, Any] = {"delta": {}} if "chat" in seen.path else {"text": ""}
        finish = [self._chunk(seen, **said) | {"choices": [rejected_choice(said)]}] if self.finish_chunk else []
        return Answer.stream(*self._role(seen), *finish, *self._usage(seen, 0), "[DONE]")


def rejected_choice(said: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, **said, "finish_reason": "stop", "stop_reason": REJECTION_PREFIX + "no_usable_prefix"}


def contract(role: Role, **changes: Any) -> EngineContract:
    values: dict[str, Any] = {
        "epoch": "e1",
        "role": role,
        "models": [MODEL],
        "block_size": 16,
        "kv_lease_seconds": 30.0,
        "features": ["append_prefill"] if role is Role.CONSUMER else [],
    }
    return EngineContract(**(values | changes))


def prefiller(number: int = 0, **changes: Any) -> FakeEngine:
    return FakeEngine(f"http://p{number}:1", contract(Role.PRODUCER, **changes))


def decoder(number: int = 0, **changes: Any) -> FakeEngine:
    return FakeEngine(f"http://d{number}:1", contract(Role.CONSUMER, **changes))


class FakeResponse(UpstreamResponse):
    pieces = 0

    def __init__(self, engine: FakeEngine, answer: Answer) -> None:
        self.status = answer.status
        self.headers = [(b"content-type", answer.kind), *answer.headers]
        self._engine = engine
        self._steps = list(answer.steps)
        self._closed = False
        engine.open += 1

    async def read(self) -> bytes:
        while self._steps:
            step = self._steps[0]
            if isinstance(step, asyncio.Event):
                await step.wait()
            self._steps.pop(0)
            if isinstance(step, Exception):
                raise step
            if isinstance(step, bytes):
                self.pieces += step.count(b"\n\n") or 1
                return step
        return b""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._engine.open -= 1
            self._engine.cancelled += bool(self._steps)


class FakeUpstream:
    """``Upstream`` from memory."""

    def __init__(self, engines: Sequence[FakeEngine]) -> None:
        self.engines = {engine.origin: engine for engine in engines}
        self.too_late = 0

    async def send(self, request: UpstreamRequest) -> FakeResponse:
        engine = self.engines[request.origin]
        if not engine.reachable:
            raise ConnectFailed(f"{request.origin}: refused")
        if request.dispatch_by is not None and self.too_late:
            self.too_late -= 1
            raise TooLate(request.origin)
        headers = {name.decode(): value.decode() for name, value in request.headers}
        try:
            answer = await engine.answer(Seen(request.path, headers, request.body))
        except asyncio.CancelledError:
            engine.cancelled += 1
            raise
        if answer.steps and isinstance(answer.steps[0], ConnectFailed):
            raise answer.steps[0]
        return FakeResponse(engine, answer)

    def forget(self, origin: str) -> None:
        return None

    def heard_at(self, origin: str) -> float:
        return 0.0

    def give_up(self, origin: str) -> int:
        return 0

    async def close(self) -> None:
        return None


BROKEN = BrokenOff("fake: connection lost")
