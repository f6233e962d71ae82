"""Errors as clients see them, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from schedloom.router.fleet.worker import Worker

Headers = Sequence[tuple[bytes, bytes]]

_COME_AGAIN: Headers = ((b"retry-after", b"1"),)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


def error_body(status: int, message: str, code: str, param: str | None = None) -> bytes:
    kind = _TYPES.get(status, "server_error")
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


class Failure(Exception):
    """A request that ends in an error before any of its output reached the client.

    Either the router's own error or an engine's, whose status and body are kept as they came. ``culprit`` is the engine
    that was asked.
    """

    is_own = False
    culprit: Worker | None = None

    def __init__(self, status: int, body: bytes, headers: Headers = ()) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body
        self.headers = list(headers)

    @classmethod
    def own(cls, status: int, message: str, code: str, param: str | None = None) -> Failure:
        """A 503 tells when to come again; a 504 does not: the same may take as long again."""
        failure = cls(status, error_body(status, message, code, param), _COME_AGAIN if status == 503 else ())
        failure.is_own = True
        return failure

    @property
    def is_the_engines_fault(self) -> bool:
        return self.status >= 500

    @property
    def may_pass(self) -> bool:
        """Whether another engine, or the same a little later, may well serve the request."""
        return self.is_the_engines_fault or self.status == 429


def no_such_endpoint() -> Failure:
    return Failure.own(404, "There is no such endpoint.", "not_found")


class Shed(Failure):
    """What no engine was asked for, because there is no room for it."""


def busy() -> Failure:
    return Shed.own(503, "The router is busy; try again later.", "overloaded")
