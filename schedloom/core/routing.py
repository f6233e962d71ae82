"""What routing policies see and answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from schedloom.core.wire import EngineContract


class Route(str, Enum):
    """How a request can be served.

    APPEND: the session's Decoder reuses the KV it holds and prefills the rest itself; may be turned away.
    PREFILL_DECODE: a Prefiller computes the prompt's KV, a Decoder pulls it and produces the output.
    DECODE: one Decoder does everything; for requests that cannot be split.
    """

    APPEND = "append"
    PREFILL_DECODE = "pd"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class SessionOwner:
    """The Decoder that holds a session's KV: which instance, which life of it, which data-parallel rank."""

    worker: str
    epoch: str
    rank: int


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request to be routed. ``splittable`` is false for what a single transfer cannot serve (several choices, several
    prompts, prompt echo or prompt log-probabilities)."""

    request_id: str
    model: str
    session: str | None
    body_bytes: int
    splittable: bool


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to serve a request. ``worker`` and ``rank`` pin the Decoder; ``None`` leaves the choice to the router.

    ``expected_cost`` is in seconds of work; attempts are made cheapest first.
    """

    route: Route
    worker: str | None = None
    rank: int | None = None
    expected_cost: float = 0.0


class WorkerView(Protocol):
    """One engine, as a routing policy sees it."""

    @property
    def name(self) -> str: ...
    @property
    def contract(self) -> EngineContract: ...
    @property
    def in_flight(self) -> int: ...


class FleetView(Protocol):
    """The healthy engines, as a routing policy sees them."""

    @property
    def prefillers(self) -> Sequence[WorkerView]: ...
    @property
    def decoders(self) -> Sequence[WorkerView]: ...
