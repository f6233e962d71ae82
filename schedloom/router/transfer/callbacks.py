"""Where Decoders ask for the prefills of requests that they have been given."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from schedloom.router.failures import Failure
from schedloom.router.requests.guard import parse_object
from schedloom.router.settings import RouterSettings
from schedloom.router.transfer.parameters import Parameters

CALLBACK_PATH: Final = "/v1/metaserver"
MAX_CALLBACK_BYTES: Final = 2**20


def callback_origin(settings: RouterSettings) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return settings.callback_url or f"http://{host}:{settings.port}"


@dataclass(frozen=True, slots=True)
class Expected:
    """One callback: the address at which it is accepted, and what it will say."""

    address: str
    parameters: asyncio.Future[Parameters]


class Callbacks:
    """Accepts each callback once, at an address that only the Decoder of its request was told.

    ``origin`` is where engines reach this router. A callback that is under way when its request ends is still accepted
    for ``grace_seconds``.
    """

    def __init__(self, origin: str, grace_seconds: float) -> None:
        self._origin = origin
        self._grace_seconds = grace_seconds
        self._expected: dict[bytes, tuple[str, Expected]] = {}

    def __len__(self) -> int:
        return len(self._expected)

    @contextmanager
    def expected(self, request_id: str) -> Iterator[Expected]:
        """A callback about ``request_id`` is accepted while this lasts, and a little longer."""
        loop = asyncio.get_running_loop()
        token = secrets.token_urlsafe(24)
        expected = Expected(f"{self._origin}{CALLBACK_PATH}?{token}", loop.create_future())
        self._expected[token.encode()] = (request_id, expected)
        try:
            yield expected
        finally:
            loop.call_later(self._grace_seconds, self._forget, token.encode())

    def _forget(self, token: bytes) -> None:
        known = self._expected.pop(token, None)
        if known is not None:
            known[1].parameters.cancel()

    def accept(self, token: bytes, body: bytes) -> None:
        """Raises Failure (404) for a token that is not expected, or no more; Failure (400) for a body that is not about
        its request.
        """
        known = self._expected.get(token)
        if known is None:
            raise Failure.own(404, "No request waits for this callback.", "unknown_callback")
        request_id, expected = known
        parameters = parse_object(body)
        if request_id not in str(parameters.get("request_id")) or parameters.get("do_remote_decode") is not True:
            raise Failure.own(400, "The callback is not about its request.", "wrong_callback")
        del self._expected[token]
        expected.parameters.set_result({**parameters, "do_remote_prefill": False})
