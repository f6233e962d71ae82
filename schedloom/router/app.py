"""The router as an ASGI application. What is not in its route table does not exist."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from schedloom import __version__
from schedloom.core.composition import compose
from schedloom.core.registry import Registry
from schedloom.router.attempts import Attempts
from schedloom.router.endpoint import Door, Generation, read_body
from schedloom.router.events.listener import Events
from schedloom.router.events.none import NobodyTells
from schedloom.router.failures import Failure, no_such_endpoint
from schedloom.router.fleet.breaker import Clock
from schedloom.router.fleet.changes import Changes
from schedloom.router.fleet.fleet import build_fleet
from schedloom.router.fleet.membership import Membership
from schedloom.router.fleet.roster import Roster
from schedloom.router.gate import Gate
from schedloom.router.http.arrivals import Arrivals
from schedloom.router.http.client import HttpUpstream
from schedloom.router.http.deadlines import Deadlines
from schedloom.router.http.line import ClientGone, line_of
from schedloom.router.http.upstream import Upstream
from schedloom.router.learning import Lessons
from schedloom.router.openapi import MODEL_PATH, MODELS_PATH, OPENAPI_PATH, openapi
from schedloom.router.pipeline import Pipeline
from schedloom.router.reply import JSON, Reply
from schedloom.router.requests.dialect import COMPLETIONS, DIALECTS
from schedloom.router.requests.headers import ClientHeaders, SessionNames
from schedloom.router.requests.tenants import Tenants
from schedloom.router.selection import Excuses, Selection, View
from schedloom.router.sessions.patience import PatientSessions
from schedloom.router.sessions.store import MemorySessions, SessionsAtHand, SessionStore
from schedloom.router.settings import RouterSettings
from schedloom.router.telemetry.metrics import Metrics
from schedloom.router.telemetry.standing import Standing
from schedloom.router.telemetry.traces import Traces
from schedloom.router.tokens import Tokens
from schedloom.router.transfer.callbacks import CALLBACK_PATH, MAX_CALLBACK_BYTES, Callbacks


class RouterApp:
    """Everything a router is made of, put together.

    ``start`` and ``close`` belong around its use as an ASGI application. ``roster`` names the engines. Raises
    ConfigurationError for policies that cannot be composed.
    """

    def __init__(
        self,
        settings: RouterSettings,
        upstream: Upstream | None = None,
        sessions: SessionStore | None = None,
        clock: Clock = time.monotonic,
        chance: Random | None = None,
        metrics: Metrics | None = None,
        registry: Registry | None = None,
        roster: Roster | None = None,
    ) -> None:
        self.roster = roster or Roster(settings.workers)
        self.fleet = build_fleet(self.roster, clock)
        self.metrics = metrics or Metrics()
        self.sessions = self._kept(sessions, settings, clock)
        self._upstream = upstream or HttpUpstream(settings.connect_timeout_seconds)
        self.membership = Membership(self.fleet, self._upstream, settings)
        policies, excuses = compose(settings.choices, registry, side="router"), Excuses(self.metrics)
        self._events = Events(self.fleet) if any(policy.listens for policy in policies.policies) else None
        view = self._view = View(clock, self._events or NobodyTells(), chance or Random())
        selection = Selection(self.fleet, policies, excuses, view)
        lessons = Lessons(policies, excuses, view)
        self._attempts = Attempts(
            self._upstream, self.fleet, selection, lessons, self.membership.suspect, settings, self.metrics, clock
        )
        self._changes = Changes(
            self.fleet, self.roster, self.membership, self._upstream, self._attempts.need, self.metrics, settings, clock
        )
        reads_tokens = any(policy.reads_tokens for policy in policies.policies)
        tokens = Tokens(self._upstream, self.fleet, settings, self.metrics) if reads_tokens else None
        pipeline = Pipeline(
            self._attempts, self.fleet, self.sessions, policies, selection, excuses, tokens, self.metrics, settings
        )
        gate = Gate(settings.max_in_flight, settings.max_waiting, settings.waiting_timeout_seconds)
        self.arrivals = Arrivals(gate.room)
        self._standing = Standing(self.fleet, lambda: gate.waiting + len(self.arrivals), self.metrics)
        deadlines = Deadlines(settings.request_timeout_seconds)
        traces = None if settings.traces is None else Traces(settings.traces, chance)
        names = SessionNames(settings.session_names) if settings.session_names else None
        limit, bounds = settings.max_body_bytes, settings.bounds
        self.door = Door(pipeline, Tenants(settings), gate, self.metrics, deadlines, limit, bounds, traces, names)
        self._created = int(time.time())
        self._routes = self._route_table()

    async def start(self, *, is_first: bool = True) -> None:
        """Raises ConfigurationError when the engines do not make a fleet, unless others serve them already."""
        await (self.membership.start() if is_first else self.membership.join())
        self._standing.start()
        if self._events is not None:
            self._events.start()

    @property
    def openapi(self) -> dict[str, Any]:
        """The description of what is in the route table."""
        routes = {path: methods for path, (methods, _) in self._routes.items()}
        return openapi(routes | {MODEL_PATH: _READ})

    def drain(self) -> None:
        """Take no new requests; those under way go on."""
        self.door.draining = True

    def renew(self) -> None:
        """Make the fleet what the roster says by now."""
        self._changes.apply()

    async def close(self) -> None:
        await self._changes.close()
        if self._events is not None:
            await self._events.close()
        await self._standing.close()
        await self.membership.close()
        await self._attempts.close()
        await self._upstream.close()
        await self.sessions.close()
        if self.door.traces is not None:
            await self.door.traces.close()

    def _kept(self, elsewhere: SessionStore | None, settings: RouterSettings, clock: Clock) -> SessionStore:
        """Sessions that are to be asked for must not take a request down with them."""
        if elsewhere is None:
            return MemorySessions(settings.session_capacity, settings.session_idle_seconds, clock)
        return elsewhere if isinstance(elsewhere, SessionsAtHand) else PatientSessions(elsewhere, self.metrics, clock)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return _nothing()
        methods, endpoint = self._routes.get(scope["path"]) or self._below(scope["path"])
        if methods and scope["method"] not in methods:
            endpoint = _WrongMethod(methods)
        return endpoint(scope, receive, send)

    def _below(self, path: str) -> _Served:
        """What is served at a path that is not in the table."""
        if not path.startswith(MODELS_PATH + "/"):
            return (), _not_found
        name = path.removeprefix(MODELS_PATH + "/")
        return _READ, _Page(lambda: self._model(name), self.door.tenants)

    def _route_table(self) -> dict[str, _Served]:
        pages = {
            "/health": _Page(self._health),
            "/ready": _Page(self._ready),
            "/version": _Page(self._version),
            OPENAPI_PATH: _Page(self._openapi),
            "/metrics": _Page(self._metrics_page),
            MODELS_PATH: _Page(self._models, self.door.tenants),
        }
        callbacks = {CALLBACK_PATH: (("POST",), _CallbackPage(self._attempts.callbacks))}
        generation = {path: (("POST",), Generation(path, self.door)) for path in DIALECTS}
        return generation | callbacks | {path: (_READ, page) for path, page in pages.items()}

    def _models(self) -> _Content:
        return 200, JSON, orjson.dumps({"object": "list", "data": [*self._models_here().values()]})

    def _model(self, name: str) -> _Content:
        """Raises Failure (404) when no Decoder that is there has it."""
        model = self._models_here().get(name)
        if model is None:
            raise Failure.own(404, f"The model {name!r} does not exist.", "model_not_found", "model")
        return 200, JSON, orjson.dumps(model)

    def _models_here(self) -> dict[str, dict[str, Any]]:
        lengths = {
            name: worker.contract.max_model_len for worker in self.fleet.decoders for name in worker.contract.models
        }
        common = {"object": "model", "created": self._created, "owned_by": "vllm"}
        return {name: {"id": name, **common, "max_model_len": length} for name, length in lengths.items()}

    def _health(self) -> _Content:
        return 200, JSON, b'{"status":"ok"}'

    def _ready(self) -> _Content:
        engines = {worker.name: worker.health.value for worker in self.fleet.workers}
        serves = "nothing" if self.door.draining else self.fleet.serves
        ready = serves != "nothing"
        return 200 if ready else 503, JSON, orjson.dumps({"ready": ready, "serves": serves, "engines": engines})

    def _version(self) -> _Content:
        return 200, JSON, orjson.dumps({"version": __version__})

    def _openapi(self) -> _Content:
        return 200, JSON, orjson.dumps(self.openapi)

    def _metrics_page(self) -> _Content:
        return 200, b"content-type: text/plain; version=0.0.4; charset=utf-8\r\n", self.metrics.exposition()


_Content = tuple[int, bytes, bytes]
"""The status, the header lines, and the body."""

_Served = tuple[tuple[str, ...], ASGIApp]
"""The methods, and what answers them."""

_READ = ("GET", "HEAD")


class _Page:
    """A page that needs no more of a request than, where ``tenants`` are given, its API key. ``content`` may raise
    Failure.
    """

    def __init__(self, content: Callable[[], _Content], tenants: Tenants | None = None) -> None:
        self._content = content
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(line_of(scope, receive, send))
        try:
            if self._tenants is not None:
                self._tenants.of(ClientHeaders(scope["headers"]).authorization)
            content = self._content()
        except Failure as failure:
            return await reply.fail(failure)
        await reply.page(*content)


class _CallbackPage:
    """Where engines ask for prefills."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(line_of(scope, receive, send))
        try:
            body = await read_body(scope, receive, MAX_CALLBACK_BYTES)
            self._callbacks.accept(scope["query_string"], body)
        except ClientGone:
            return
        except Failure as failure:
            return await reply.fail(failure)
        await reply.page(200, JSON, b'{"status":"ok"}')


class _WrongMethod:
    """Tells which methods there are."""

    def __init__(self, methods: tuple[str, ...]) -> None:
        self._methods = ", ".join(methods)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure = Failure.own(405, f"The method must be {self._methods}.", "method_not_allowed")
        failure.headers = [(b"allow", self._methods.encode())]
        dialect = DIALECTS.get(scope["path"], COMPLETIONS)
        await Reply(line_of(scope, receive, send), dialect).fail(failure)


async def _nothing() -> None:
    return None


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    await Reply(line_of(scope, receive, send)).fail(no_such_endpoint())
