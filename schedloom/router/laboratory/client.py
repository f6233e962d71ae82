"""A client of an ASGI application, without a server in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp


@dataclass
class Received:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    ended: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """The data of every event; the stream must consist of whole events."""
        assert self.body.endswith(b"\n\n"), self.body
        return [event.removeprefix("data: ") for event in self.body.decode().split("\n\n")[:-1]]

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(event) for event in self.events if event != "[DONE]"]

    @property
    def text(self) -> str:
        if self.headers["content-type"].startswith("application/json"):
            choice = self.json["choices"][0]
            return str(choice["text"] if "text" in choice else choice["message"]["content"])
        choices = [choice for part in self.objects for choice in part.get("choices", [])]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)

    @property
    def decision(self) -> str:
        return self.headers["x-schedloom-decision"]


class Client:
    """``leave`` closes the connection of the request under way; ``on_start`` is called as an answer begins."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.leave = asyncio.Event()
        self.on_start: Callable[[], None] = lambda: None

    async def chat(self, session: str | None = None, **body: Any) -> Received:
        fields = {"model": "fake-model", "messages": [{"role": "user", "content": "hello"}]} | body
        headers = {} if session is None else {"X-Session-ID": session}
        return await self.post("/v1/chat/completions", fields, headers)

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Received:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self._request("POST", path, raw, headers or {})

    async def get(self, path: str) -> Received:
        return await self._request("GET", path, b"", {})

    async def _request(self, method: str, path: str, raw: bytes, headers: dict[str, str]) -> Received:
        received = Received()
        pending = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if pending:
                return pending.pop()
            await self.leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            assert not received.ended
            if message["type"] == "http.response.start":
                assert received.status == 0
                self.on_start()
                received.status = message["status"]
                received.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                received.chunks.append(message.get("body", b""))
                received.ended = not message.get("more_body", False)

        scope = {
            "type": "http",
            "method": method,
            "path": path.partition("?")[0],
            "root_path": "",
            "query_string": path.partition("?")[2].encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        }
        await self._app(scope, receive, send)
        return received
