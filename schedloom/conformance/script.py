"""What is done to an engine, as data: a run is a list of acts, and can be written down, replayed and cut shorter."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args


@dataclass(frozen=True, slots=True)
class Arrive:
    """A request comes.

    Its prompt is the first ``keep`` tokens of request ``parent``'s conversation, when there is one, and ``fresh``
    tokens of its own; the first ``head`` tokens are its own in any case. ``marked``: a local attempt, which may be
    turned away. A ``fast`` transfer is over in the moment it begins. ``continuable``: the router's mark of a request
    that may be handed back, ``seeded`` or not.
    """

    number: int
    fresh: int
    max_tokens: int
    parent: int | None = None
    keep: int = 0
    marked: bool = False
    transfer: Literal["", "receive", "send"] = ""
    salt: str | None = None
    priority: int = 0
    head: int = 0
    job_class: str | None = None
    fast: bool = False
    adapter: int = 0
    continuable: bool = False
    seeded: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """``throttled``: prefill waits for another step, as data-parallel ranks have it to be in step with one another."""

    count: int = 1
    throttled: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    """The client of a request goes away; ``twice``: the engine is told so two times."""

    number: int
    twice: bool = False


@dataclass(frozen=True, slots=True)
class Settle:
    """The transfer of a request comes to its end, if one is under way."""

    number: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Squeeze:
    """Up to ``blocks`` free blocks are taken away until Relax."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Relax:
    pass


@dataclass(frozen=True, slots=True)
class Reset:
    """The prefix cache is reset: ``running`` preempts what runs, ``connector`` reaches the connector's cache."""

    running: bool = False
    connector: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """The scheduler is paused: for everybody, or for requests that hold no KV."""

    new_only: bool = False


@dataclass(frozen=True, slots=True)
class Resume:
    pass


@dataclass(frozen=True, slots=True)
class Wait:
    """Time passes in which the engine makes no step."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Crowd:
    """Another data-parallel rank says how many requests it runs, and which share of its KV blocks is in use."""

    running: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class Lose:
    """The far side is gone: every transfer that is under way fails."""


@dataclass(frozen=True, slots=True)
class Silence:
    """For so many steps nobody hears from the workers which saves are done. What they said is lost."""

    steps: int


@dataclass(frozen=True, slots=True)
class Synchronise:
    """The device catches up with all dispatched work."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Every fault heals, and the engine runs until it is empty."""


Act = (
    Arrive | Step | Abort | Settle | Squeeze | Relax | Reset | Pause | Resume | Wait | Crowd | Lose | Silence
    | Synchronise | Drain
)  # fmt: skip
_ACTS: dict[str, type[Act]] = {act.__name__.lower(): act for act in get_args(Act)}


def name_of(act: Act) -> str:
    return type(act).__name__.lower()


def to_plain(act: Act) -> dict[str, Any]:
    return {"act": name_of(act), **asdict(act)}


def from_plain(plain: dict[str, Any]) -> Act:
    """Raises ValueError for an unknown act."""
    settings = dict(plain)
    name = settings.pop("act", None)
    if name not in _ACTS:
        raise ValueError(f"there is no act {name!r}; known are: {', '.join(sorted(_ACTS))}")
    return _ACTS[name](**settings)
