"""A client's request, read and bounded, before any decision about it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from schedloom.core.continuation import RESUME_KEY
from schedloom.core.routing import RouteRequest
from schedloom.router.body import NO_MARKS, GenerationBody, Marks
from schedloom.router.dialect import DIALECTS
from schedloom.router.fleet import Worker
from schedloom.router.headers import ClientHeaders, session_of
from schedloom.router.sessions import SessionKey
from schedloom.router.tenants import EVERYBODY, Tenant


@dataclass(slots=True)
class Call:
    """``session`` is as engines see it, ``key`` is what ownership is recorded under. ``marks`` are for Decoders that
    continue what others hand back, ``source`` is what a Prefiller is asked where that is not the same. ``lines`` are
    the headers that every attempt carries, as they are sent, once there was one.
    """

    path: str
    body: GenerationBody
    headers: ClientHeaders
    session: str | None
    key: SessionKey | None
    lines: bytes = b""
    token_ids: list[int] | None = None
    marks: Marks = field(default_factory=dict)
    source: Call | None = None
    _route: RouteRequest | None = None

    @property
    def splittable(self) -> bool:
        return DIALECTS[self.path].split and self.body.splittable

    @property
    def prefill(self) -> Call:
        return self.source or self

    @property
    def resumes(self) -> bool:
        """Whether an engine handed it back with output."""
        return RESUME_KEY in self.marks

    def marks_for(self, worker: Worker) -> Marks:
        return self.marks if self.marks and worker.resumes else NO_MARKS

    @property
    def route(self) -> RouteRequest:
        """The request as routing policies see it."""
        if self._route is None:
            body = self.body
            tokens = self.token_ids or body.token_ids
            told = (new_request_id(), body.model, self.session, len(body.raw), self.splittable, self.headers.hints)
            self._route = RouteRequest(*told, body.salt, tokens, body.prompt)
        return self._route


def new_request_id() -> str:
    return random.getrandbits(128).to_bytes(16, "big").hex()


def read_call(path: str, headers: ClientHeaders, raw: bytes, tenant: Tenant = EVERYBODY) -> Call:
    """Raises Failure (400) for what cannot be understood."""
    body = GenerationBody(raw, tenant.salt)
    session = session_of(headers, body.conversation)
    if session is None or not DIALECTS[path].turn:
        return Call(path, body, headers, None, None)
    key = SessionKey(tenant.name, body.model, session)
    return Call(path, body, headers, tenant.session(session), key)
