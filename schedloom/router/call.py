"""A client's request, read and bounded, before any decision about it."""

from __future__ import annotations

from dataclasses import dataclass

from schedloom.core.routing import RouteRequest
from schedloom.router.body import GenerationBody
from schedloom.router.dialect import DIALECTS
from schedloom.router.headers import ClientHeaders, session_of
from schedloom.router.sessions import SessionKey
from schedloom.router.tenants import EVERYBODY, Tenant
from schedloom.router.upstream import Header


@dataclass(slots=True)
class Call:
    """``session`` is as engines see it, ``key`` is what ownership is recorded under."""

    path: str
    body: GenerationBody
    headers: ClientHeaders
    session: str | None
    key: SessionKey | None
    common_headers: list[Header] | None = None

    @property
    def splittable(self) -> bool:
        return DIALECTS[self.path].split and self.body.splittable

    def route_request(self, request_id: str) -> RouteRequest:
        return RouteRequest(
            request_id=request_id,
            model=self.body.model,
            session=self.session,
            body_bytes=len(self.body.raw),
            splittable=self.splittable,
        )


def read_call(path: str, headers: ClientHeaders, raw: bytes, tenant: Tenant = EVERYBODY) -> Call:
    """Raises Failure (400) for what cannot be understood."""
    body = GenerationBody(raw, tenant.salt)
    session = session_of(headers, body.conversation)
    if session is None or not DIALECTS[path].turn:
        return Call(path, body, headers, None, None)
    key = SessionKey(tenant.name, body.model, session)
    return Call(path, body, headers, tenant.session(session), key)
