"""What routing policies see and answer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from hashlib import sha256
from random import Random
from typing import Final, Protocol

from schedloom.core.wire import EngineContract

PREFIX_BLOCK_BYTES: Final = 1024
"""Bytes of a prompt that ``RouteRequest.prefix_blocks`` takes together."""


class Route(str, Enum):
    """How a request can be served.

    APPEND: the session's Decoder reuses the KV it holds and prefills the rest itself; may be turned away.
    PREFILL_DECODE: a Prefiller computes the prompt's KV, a Decoder pulls it and produces the output.
    PULL_BACK: the same, but the Prefiller first pulls what the session's Decoder kept of the turn before, and computes
    the rest only. Ordinary where nothing is kept, or it cannot be proved that the prompt goes on where that turn ended.
    DECODE: one Decoder does everything; for requests that cannot be split.
    """

    APPEND = "append"
    PREFILL_DECODE = "pd"
    PULL_BACK = "pull_back"
    DECODE = "decode"


class Leg(str, Enum):
    """The part of a request's work that a worker is chosen for.

    PREFILL: computing the prompt's KV. DECODE: the output, with KV pulled from a Prefiller or computed on the spot.
    APPEND: a local attempt on the worker that a plan names; here filters alone are asked, and whether it is made.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    APPEND = "append"


@dataclass(frozen=True, slots=True)
class SessionOwner:
    """The Decoder that holds a session's KV: which instance, which life of it, which data-parallel rank."""

    worker: str
    epoch: str
    rank: int


class RouteRequest:
    """A request to be routed. What costs anything is worked out when a policy first asks for it.

    ``session`` is as engines see it. ``body_bytes`` is the size of the client's body. ``splittable`` is false for what
    a single transfer cannot serve: several choices, several prompts, prompt echo or prompt log-probabilities.
    """

    model: str
    session: str | None
    body_bytes: int
    splittable: bool

    @cached_property
    def hints(self) -> Mapping[str, str]:
        """The client's headers that begin with ``x-schedloom-``, by the rest of their names."""
        return {}

    @cached_property
    def cache_salt(self) -> str | None:
        """What keeps the engines' prefix caches of several tenants apart."""
        return None

    @cached_property
    def follows_up(self) -> bool:
        """Whether an answer stands in the prompt already, as it does in every turn but a session's first.

        A completion's prompt does not tell, and counts as a first turn.
        """
        return False

    @cached_property
    def token_ids(self) -> Sequence[int] | None:
        """The prompt's, where a policy with ``reads_tokens`` is on and they could be had."""
        return None

    @cached_property
    def prompt(self) -> bytes:
        """What the model is asked, tools first: prompts with a common beginning have a common prefix here too."""
        return b""

    @cached_property
    def prefix_blocks(self) -> tuple[bytes, ...]:
        """A digest for each whole block of ``prompt``, which stands for the prompt up to the end of that block.

        Equal for equal prefixes of one model and salt, and for no others.
        """
        return tuple(self._chain())

    def _chain(self) -> Iterator[bytes]:
        prompt, so_far = memoryview(self.prompt), sha256(repr((self.model, self.cache_salt)).encode())
        for end in range(PREFIX_BLOCK_BYTES, len(prompt) + 1, PREFIX_BLOCK_BYTES):
            so_far.update(prompt[end - PREFIX_BLOCK_BYTES : end])
            yield so_far.copy().digest()


@dataclass
class Question(RouteRequest):
    """A request made up, for tests of routing policies."""

    model: str = "model"
    session: str | None = None
    body_bytes: int = 0
    splittable: bool = True
    hints: Mapping[str, str] = field(default_factory=dict)
    cache_salt: str | None = None
    follows_up: bool = False
    token_ids: Sequence[int] | None = None
    prompt: bytes = b""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to serve a request. ``worker`` and ``rank`` pin the Decoder; ``None`` leaves the choice to the router.

    ``expected_cost`` is in seconds of work; attempts are made cheapest first. Raises TypeError for what is no attempt.
    """

    route: Route
    worker: str | None = None
    rank: int | None = None
    expected_cost: float = 0.0

    def __post_init__(self) -> None:
        fits = isinstance(self.worker, str | None) and isinstance(self.rank, int | None)
        if not (fits and isinstance(self.route, Route) and isinstance(self.expected_cost, int | float)):
            raise TypeError(f"an attempt has a route, an engine's name, a rank and a cost in seconds, not {self}")
        if math.isnan(self.expected_cost):
            raise TypeError("an attempt's cost is a number")


class Candidate(Protocol):
    """One data-parallel rank of one engine, as a routing policy sees it. The object is the same for one life of it."""

    @property
    def name(self) -> str:
        """Of the engine, by its place in this router's configuration."""
        ...

    @property
    def origin(self) -> str:
        """Where the engine serves: the same for every router, whatever else it has and in whatever order."""
        ...

    @property
    def rank(self) -> int: ...
    @property
    def contract(self) -> EngineContract: ...
    @property
    def in_flight(self) -> int:
        """Requests that this router has under way there."""
        ...

    @property
    def in_flight_bytes(self) -> int:
        """The size of their bodies, which stands for their tokens: about four bytes make one."""
        ...


@dataclass(frozen=True, slots=True)
class Held:
    """So many first tokens have their KV in an engine; not ``exact`` where it may be more."""

    tokens: int
    exact: bool


class Residency(Protocol):
    """The KV that engines say they hold. ``None`` where nobody tells."""

    def of_prompt(self, candidate: Candidate, token_ids: Sequence[int], cache_salt: str | None) -> Held | None:
        """Of a prompt."""
        ...

    def of_session(self, candidate: Candidate, session: str) -> Held | None:
        """Of all that a session's last turn left there, its answer included."""
        ...


class RoutingView(Protocol):
    """What a routing policy sees beside the request and the candidates."""

    @property
    def now(self) -> float:
        """Seconds of a monotonic clock: the only clock that a policy may read."""
        ...

    @property
    def random(self) -> Random:
        """The only source of chance that a policy may use."""
        ...

    @property
    def residency(self) -> Residency: ...


class Ending(str, Enum):
    """How an attempt ended. LEFT: it says nothing about the worker, its client left or was at fault."""

    ANSWERED = "answered"
    FULL = "full"
    FAILED = "failed"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """What became of one attempt on one worker.

    Times are in seconds from the dispatch; ``first_byte`` is the answer's head, for PREFILL the whole answer, and
    ``None`` when there was none. ``bytes_before`` and ``requests_before`` are what was under way there at the dispatch.
    Tokens are what the answer says of itself, ``None`` where it does not.
    """

    leg: Leg
    candidate: Candidate
    ending: Ending
    seconds: float
    first_byte: float | None = None
    requests_before: int = 0
    bytes_before: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


class WorkerView(Protocol):
    """One engine, as a routing policy sees it."""

    @property
    def name(self) -> str: ...
    @property
    def contract(self) -> EngineContract: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def load(self) -> float:
        """Requests under way per rank."""
        ...

    @property
    def targets(self) -> Sequence[Candidate]:
        """Its data-parallel ranks."""
        ...


class FleetView(Protocol):
    """The healthy engines, as a routing policy sees them."""

    @property
    def prefillers(self) -> Sequence[WorkerView]: ...
    @property
    def decoders(self) -> Sequence[WorkerView]: ...
