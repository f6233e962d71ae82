"""A client's request, read and bounded, before any decision about it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from schedloom.core.continuation import RESUME_KEY
from schedloom.core.routing import RouteRequest
from schedloom.router.fleet.worker import Worker
from schedloom.router.requests.body import NO_MARKS, GenerationBody, Marks
from schedloom.router.requests.bounds import OutputBounds
from schedloom.router.requests.dialect import DIALECTS
from schedloom.router.requests.headers import ClientHeaders, SessionNames, session_of
from schedloom.router.requests.tenants import EVERYBODY, Tenant
from schedloom.router.sessions.store import SessionKey

if TYPE_CHECKING:
    from schedloom.router.telemetry.traces import Trace


class Call(RouteRequest):
    """``session`` is as engines see it, ``key`` is what ownership is recorded under. ``marks`` are for Decoders that
    continue what others hand back, ``source`` is what a Prefiller is asked where that is not the same. ``lines`` are
    the headers that every attempt carries, as they are sent, once there was one. ``trace`` is of one that is traced.
    """

    def __init__(
        self, path: str, body: GenerationBody, headers: ClientHeaders, session: str | None, key: SessionKey | None
    ) -> None:
        self.path = path
        self.body = body
        self.headers = headers
        self.session = session
        self.key = key
        self.model = body.model
        self.body_bytes = len(body.raw)
        self.splittable = body.splittable and DIALECTS[path].split
        self.lines = b""
        self.marks: Marks = NO_MARKS
        self.source: Call | None = None
        self.trace: Trace | None = None

    @cached_property
    def hints(self) -> Mapping[str, str]:
        return self.headers.hints

    @cached_property
    def cache_salt(self) -> str | None:
        return self.body.salt

    @cached_property
    def follows_up(self) -> bool:
        return self.body.follows_up()

    @cached_property
    def token_ids(self) -> Sequence[int] | None:
        return self.body.token_ids

    @cached_property
    def prompt(self) -> bytes:
        return self.body.prompt()

    @property
    def prefill(self) -> Call:
        return self.source or self

    @property
    def resumes(self) -> bool:
        """Whether an engine handed it back with output."""
        return RESUME_KEY in self.marks

    def marks_for(self, worker: Worker) -> Marks:
        return self.marks if self.marks and worker.resumes else NO_MARKS

    def marked(self, marks: Marks, source: Call | None = None) -> Call:
        """The same with other marks."""
        call = Call(self.path, self.body, self.headers, self.session, self.key)
        call.lines, call.token_ids, call.trace = self.lines, self.token_ids, self.trace
        call.marks, call.source = marks, source
        return call

    def asking(self, path: str, body: GenerationBody) -> Call:
        """Something else in its place, without marks."""
        call = Call(path, body, self.headers, self.session, self.key)
        call.lines, call.trace = self.lines, self.trace
        return call


def new_request_id() -> str:
    return random.getrandbits(128).to_bytes(16, "big").hex()


def read_call(
    path: str,
    headers: ClientHeaders,
    raw: bytes,
    tenant: Tenant = EVERYBODY,
    names: SessionNames | None = None,
    bounds: OutputBounds | None = None,
) -> Call:
    """Raises Failure (400) for what cannot be understood, or asks for too much."""
    body = GenerationBody(raw, tenant.salt)
    if bounds is not None and (bounds.are_of_tokens or not body.splittable):
        bounds.hold(body)
    session = session_of(headers, body.conversation, names, body.fields)
    if session is None or not DIALECTS[path].turn:
        return Call(path, body, headers, None, None)
    key = SessionKey(tenant.name, body.model, session)
    return Call(path, body, headers, tenant.session(session), key)
