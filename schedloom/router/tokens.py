"""The tokens of prompts, from an engine that makes them."""

from __future__ import annotations

import time

import orjson

from schedloom.router.fleet.fleet import Fleet
from schedloom.router.http.upstream import (
    Header,
    Timeouts,
    Upstream,
    UpstreamError,
    UpstreamRequest,
    lines_of,
    read_soon,
)
from schedloom.router.keys import engine_authorization
from schedloom.router.requests.body import are_token_ids
from schedloom.router.requests.call import Call
from schedloom.router.settings import RouterSettings
from schedloom.router.sse import parsed
from schedloom.router.telemetry.metrics import Metrics

_LONGEST_ANSWER = 2**26

_KEYS = (
    "model",
    "prompt",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
)


class Tokens:
    """Has prompts tokenized by the least busy Decoder. What fails, or takes too long, is not known."""

    def __init__(self, upstream: Upstream, fleet: Fleet, settings: RouterSettings, metrics: Metrics) -> None:
        self._upstream = upstream
        self._fleet = fleet
        self._settings = settings
        self._metrics = metrics

    async def of(self, call: Call) -> list[int] | None:
        if not call.splittable or call.body.token_ids or not self._fleet.decoders:
            return None
        begun = time.perf_counter()
        try:
            answer = await self._asked(call)
        except UpstreamError:
            return None
        finally:
            self._metrics.tokenizing.observe(time.perf_counter() - begun)
        tokens = parsed(answer).get("tokens")
        return tokens if are_token_ids(tokens) else None

    async def _asked(self, call: Call) -> bytes:
        fields = {key: call.body.fields[key] for key in _KEYS if key in call.body.fields}
        origin = min(self._fleet.decoders, key=lambda decoder: decoder.load).origin
        patience = self._settings.health_timeout_seconds
        request = UpstreamRequest(
            origin,
            "POST",
            "/tokenize",
            (lines_of(self._headers(call)),),
            orjson.dumps(fields),
            Timeouts(patience, patience),
        )
        response = await self._upstream.send(request)
        try:
            return await read_soon(response, patience, _LONGEST_ANSWER)
        finally:
            response.close()

    def _headers(self, call: Call) -> list[Header]:
        headers = [(b"content-type", b"application/json")]
        authorization = engine_authorization(self._settings)
        if self._settings.forward_authorization:
            authorization = call.headers.authorization
        return headers if authorization is None else [*headers, (b"authorization", authorization)]
