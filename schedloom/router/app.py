"""The router as an ASGI application. What is not in its route table does not exist."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from schedloom import __version__
from schedloom.core.composition import compose
from schedloom.router.attempts import Attempts
from schedloom.router.call import read_call
from schedloom.router.client import HttpUpstream
from schedloom.router.failures import Failure
from schedloom.router.fleet import build_fleet
from schedloom.router.headers import ClientHeaders
from schedloom.router.membership import Membership
from schedloom.router.metrics import Metrics
from schedloom.router.pipeline import Pipeline
from schedloom.router.relay import Outcome
from schedloom.router.reply import JSON, Reply
from schedloom.router.sessions import MemorySessions
from schedloom.router.settings import RouterSettings
from schedloom.router.upstream import Upstream

log = logging.getLogger(__name__)

GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions")


class ClientGone(Exception):
    """The client closed its connection."""


class RouterApp:
    """Everything a router is made of, put together.

    ``start`` and ``close`` belong around its use as an ASGI application. Raises ConfigurationError for
    policies that cannot be composed.
    """

    def __init__(self, settings: RouterSettings, upstream: Upstream | None = None) -> None:
        self.settings = settings
        self.fleet = build_fleet(settings.workers)
        self.metrics = Metrics()
        self.sessions = MemorySessions(
            settings.session_capacity, settings.session_idle_seconds, time.monotonic
        )
        self._upstream = upstream or HttpUpstream(settings.connect_timeout_seconds)
        self.membership = Membership(self.fleet, self._upstream, settings)
        attempts = Attempts(self._upstream, self.fleet, self.membership.suspect, settings)
        policies = compose(settings.choices)
        self._pipeline = Pipeline(attempts, self.fleet, self.sessions, policies, self.metrics)
        self._created = int(time.time())
        self._routes = self._route_table()

    async def start(self) -> None:
        """Raises ConfigurationError when the engines do not make a fleet."""
        await self.membership.start()

    async def close(self) -> None:
        await self.membership.close()
        await self._upstream.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        methods, endpoint = self._routes.get(scope["path"], ((), _not_found))
        if methods and scope["method"] not in methods:
            endpoint = _WrongMethod(methods)
        await endpoint(scope, receive, send)

    def _route_table(self) -> dict[str, tuple[tuple[str, ...], ASGIApp]]:
        pages = {
            "/v1/models": self._models,
            "/health": self._health,
            "/ready": self._ready,
            "/version": self._version,
            "/metrics": self._metrics_page,
        }
        generation = {path: (("POST",), Generation(path, self)) for path in GENERATION_PATHS}
        return generation | {path: (("GET", "HEAD"), _Page(content)) for path, content in pages.items()}

    def _models(self) -> _Content:
        ready = [worker for worker in self.fleet.workers if worker in self.fleet.decoders]
        lengths = {name: worker.contract.max_model_len for worker in ready for name in worker.contract.models}
        models = [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "vllm",
                "max_model_len": length,
            }
            for name, length in lengths.items()
        ]
        return 200, JSON, orjson.dumps({"object": "list", "data": models})

    def _health(self) -> _Content:
        return 200, JSON, b'{"status":"ok"}'

    def _ready(self) -> _Content:
        engines = {worker.name: worker.health.value for worker in self.fleet.workers}
        ready = self.fleet.serves
        return 200 if ready else 503, JSON, orjson.dumps({"ready": ready, "engines": engines})

    def _version(self) -> _Content:
        return 200, JSON, orjson.dumps({"version": __version__})

    def _metrics_page(self) -> _Content:
        kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        return 200, kind, self.metrics.exposition()

    async def serve(self, path: str, scope: Scope, receive: Receive, reply: Reply) -> Outcome:
        raw = await _read_body(receive, self.settings.max_body_bytes)
        call = read_call(path, ClientHeaders(scope["headers"]), raw)
        async with _cancelled_when_the_client_leaves(receive):
            return await self._pipeline.serve(call, reply)


_Content = tuple[int, tuple[bytes, bytes], bytes]


class _Page:
    """A page that needs no request."""

    def __init__(self, content: Callable[[], _Content]) -> None:
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, kind, body = self._content()
        await Reply(send).whole(status, [kind], body)


class Generation:
    """One generating endpoint."""

    def __init__(self, path: str, app: RouterApp) -> None:
        self._path = path
        self._app = app
        self._metrics = app.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send)
        begun = time.perf_counter()
        reply.on_start = lambda: self._metrics.first_byte.labels(reply.decision).observe(
            time.perf_counter() - begun
        )
        with self._metrics.in_flight.track_inprogress():
            outcome = await self._outcome(scope, receive, reply)
        self._metrics.requests.labels(reply.decision or "none", outcome).inc()

    async def _outcome(self, scope: Scope, receive: Receive, reply: Reply) -> str:
        try:
            return (await self._app.serve(self._path, scope, receive, reply)).value
        except ClientGone:
            return "served" if reply.succeeded else "client_left"
        except Failure as failure:
            await reply.fail(failure)
            return "refused" if failure.status < 500 else "failed"
        except Exception:
            log.exception("a request ended in an unforeseen error")
            await _crash(reply)
            return "failed"


async def _crash(reply: Reply) -> None:
    if reply.started:
        await reply.break_off("The router failed.", "internal_error")
    else:
        await reply.fail(Failure.own(500, "The router failed.", "internal_error"))


class _WrongMethod:
    """Tells which methods there are."""

    def __init__(self, methods: tuple[str, ...]) -> None:
        self._methods = ", ".join(methods)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure = Failure.own(405, f"The method must be {self._methods}.", "method_not_allowed")
        failure.headers = [(b"allow", self._methods.encode())]
        await Reply(send).fail(failure)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    await Reply(send).fail(Failure.own(404, "There is no such endpoint.", "not_found"))


async def _read_body(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise Failure.own(413, f"The body must not exceed {limit} bytes.", "body_too_large")
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


@asynccontextmanager
async def _cancelled_when_the_client_leaves(receive: Receive) -> AsyncIterator[None]:
    """Everything under way for a client is cancelled as soon as it closes its connection."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone:
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()
