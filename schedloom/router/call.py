"""A client's request, read and bounded, before any decision about it."""

from __future__ import annotations

from dataclasses import dataclass

from schedloom.core.routing import RouteRequest
from schedloom.router.body import GenerationBody
from schedloom.router.headers import ClientHeaders, session_of, session_value
from schedloom.router.sessions import SessionKey
from schedloom.router.upstream import Header

EVERYBODY = ""
"""The tenant of all clients while there are no API keys."""


@dataclass(frozen=True, slots=True)
class Call:
    """``session`` is as the client named it, ``key`` is what ownership is recorded under."""

    path: str
    body: GenerationBody
    headers: ClientHeaders
    session: str | None
    key: SessionKey | None

    @property
    def session_header(self) -> list[Header]:
        return [] if self.session is None else [(b"x-session-id", session_value(self.session))]

    def route_request(self, request_id: str) -> RouteRequest:
        return RouteRequest(
            request_id=request_id,
            model=self.body.model,
            session=self.session,
            body_bytes=len(self.body.raw),
            splittable=self.body.splittable,
        )


def read_call(path: str, headers: ClientHeaders, raw: bytes, tenant: str = EVERYBODY) -> Call:
    """Raises Failure (400) for what cannot be understood."""
    body = GenerationBody(raw)
    session = session_of(headers, body.conversation)
    key = None if session is None else SessionKey(tenant, body.model, session)
    return Call(path, body, headers, session, key)
