"""The router's answer to one client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from starlette.types import Send

from schedloom.core.routing import SessionOwner
from schedloom.router.dialect import COMPLETIONS, Dialect
from schedloom.router.failures import Failure, error_body
from schedloom.router.headers import DECISION_HEADER, DECODER_HEADER, REQUEST_ID_HEADER
from schedloom.router.story import Story
from schedloom.router.transfer.turn import Turn
from schedloom.router.upstream import Header

JSON = (b"content-type", b"application/json")


class Reply:
    """Written once, front to back. ``started`` tells whether anything has left.

    ``on_start`` is called as the first byte leaves, ``on_success`` when an engine's answer is known to be
    complete, before its last bytes leave: whoever reads the end may rely on what was recorded. ``story`` is kept of a
    request that an engine may hand back, ``turn`` of one whose KV a Prefiller may pull later.
    """

    def __init__(self, send: Send, dialect: Dialect = COMPLETIONS) -> None:
        self.dialect = dialect
        self.started = False
        self.ended = False
        self.succeeded = False
        self.decision = ""
        self.owner: SessionOwner | None = None
        self.story: Story | None = None
        self.turn: Turn | None = None
        self.on_start: Callable[[], None] = _nothing
        self.on_success: Callable[[], Awaitable[None]] = _nothing_later
        self._send = send
        self._about: list[Header] = []

    def about(self, decision: str, request_id: str, owner: SessionOwner) -> None:
        """Which attempt the answer will be of; a later attempt replaces an earlier one."""
        self.decision = decision
        self.owner = owner
        self._about = [
            (DECISION_HEADER, decision.encode()),
            (DECODER_HEADER, owner.worker.encode()),
            (REQUEST_ID_HEADER, request_id.encode()),
        ]

    async def whole(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        await self._start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.end(body)

    async def start_stream(self, headers: Iterable[Header]) -> None:
        await self._start(200, headers)

    async def write(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self, last: bytes = b"") -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": last})

    async def succeed(self) -> None:
        self.succeeded = True
        await self.on_success()

    async def fail(self, failure: Failure) -> None:
        """Answer with an error instead of output."""
        headers = list(failure.headers)
        if not any(name == b"content-type" for name, _ in headers):
            headers.append(JSON)
        await self.whole(failure.status, headers, failure.body)

    async def stop(self, failure: Failure) -> None:
        """The router itself gives up: an error in place of an answer, or in the midst of one."""
        if not self.started:
            await self.fail(failure)
        elif not self.ended:
            await self.end(self.dialect.error(failure.body))

    async def break_off(self, message: str, code: str) -> None:
        """End a stream with an error event: what was delivered is not a complete answer."""
        await self.end(self.dialect.error(error_body(502, message, code)))

    async def _start(self, status: int, headers: Iterable[Header]) -> None:
        self.started = True
        self.on_start()
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self._about]})


def _nothing() -> None:
    return None


async def _nothing_later() -> None:
    return None
