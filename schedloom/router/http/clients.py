"""The connections of one server, and what holds for all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from starlette.types import ASGIApp

from schedloom.router.http.arrivals import Arrivals
from schedloom.router.http.deadlines import Deadlines
from schedloom.router.http.exchange import ClientExchange
from schedloom.router.http.outbox import Outbox

if TYPE_CHECKING:
    from schedloom.router.http.protocol import ClientConnection


class Limits(NamedTuple):
    """Sizes in bytes, times in seconds. ``idle_seconds`` is how long a connection is kept without a request.

    What engines would serve and ``may_come`` has no room for is refused (503) for a fifth of what it costs to serve it;
    then ``on_refused`` is called. ``arrivals`` are those of one server. Beyond ``most_connections`` whoever connects
    waits in the kernel's line.
    """

    max_header_bytes: int = 64 * 1024
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    idle_seconds: float = 5.0
    may_come: Callable[[], bool] = lambda: True
    arrivals: Arrivals | None = None
    most_connections: int = sys.maxsize
    on_refused: Callable[[], None] = lambda: None


class Clients:
    """The connections of one server, and the requests under way on them."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app = app
        self.limits = limits
        self.heads = Deadlines(limits.header_seconds)
        self.bodies = Deadlines(limits.body_seconds)
        self.connections: set[ClientConnection] = set()
        self.under_way: set[ClientExchange] = set()
        self.outbox = Outbox()
        self.arrivals = Arrivals() if limits.arrivals is None else limits.arrivals
        self.leaving = False

    def leave(self) -> None:
        """Close every connection after the answers that were asked for on it."""
        self.leaving = True
        self.arrivals.empty()
        for connection in tuple(self.connections):
            connection.leave()
