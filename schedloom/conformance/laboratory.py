"""What the suite needs of an engine, and where it finds one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

from schedloom.conformance.cells import Cell
from schedloom.conformance.chain import Chain
from schedloom.core.composition import PolicySet
from schedloom.core.errors import ConfigurationError

GROUP = "schedloom.laboratories"


@dataclass(frozen=True, slots=True)
class Order:
    """A request, as an engine takes it. ``arrival`` is in seconds; ``transfer`` is "", "receive" or "send"; a ``fast``
    one is over in the moment it begins. A ``continuable`` one may be handed back; one with a ``ticket`` was."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    marked: bool
    transfer: str
    salt: str | None
    priority: int
    arrival: float
    fast: bool = False
    adapter: int = 0
    session: str | None = None
    job_class: str | None = None
    continuable: bool = False
    seeded: bool = False
    ticket: str | None = None


class Output(Protocol):
    """What a client gets in one step. ``read`` is the state that the model read behind the last token."""

    request_id: str
    tokens: list[int]
    finish_reason: str | None
    stop_reason: Any
    read: int | None


class Preemption(Protocol):
    """``freed`` blocks became free at once; ``deferred``: others wait for a step in flight; ``reset``: by a reset;
    ``alone``: no other request held KV; ``uncomputed`` blocks that it was to compute are in the prefix cache."""

    request_id: str
    freed: int
    deferred: bool
    reset: bool
    alone: bool
    uncomputed: int


class Report(Protocol):
    """One step: tokens scheduled, tokens that a request (re)joins with, blocks that each was given, and the outputs of
    the oldest step in flight."""

    @property
    def scheduled(self) -> dict[str, int]: ...
    @property
    def admitted(self) -> dict[str, int]: ...
    @property
    def blocks(self) -> dict[str, tuple[list[int], ...]]:
        """Of each KV cache group; 0 stands where a group needs no block."""
        ...

    @property
    def zeroed(self) -> int: ...
    @property
    def left(self) -> dict[str, int]:
        """The tokens that each scheduled request had to compute: of one that decodes, one."""
        ...

    @property
    def streams(self) -> Sequence[str]:
        """The running requests that had a token at most to compute; ``prefilling`` counts those that had more."""
        ...

    @property
    def prefilling(self) -> int: ...
    @property
    def saved(self) -> Sequence[tuple[str, int]]:
        """The preempted requests whose KV is saved, with the tokens that they had computed."""
        ...

    @property
    def refreshed(self) -> Sequence[int]:
        """The blocks that were put off from eviction."""
        ...

    @property
    def now(self) -> float: ...
    @property
    def counted(self) -> Sequence[str]:
        """The requests that entered the statistics of the prefix cache."""
        ...

    @property
    def sampled(self) -> Sequence[str]:
        """The requests for which the oldest step in flight sampled tokens."""
        ...

    @property
    def outputs(self) -> Sequence[Output] | None: ...
    @property
    def preemptions(self) -> Sequence[Preemption]: ...


class Engine(Protocol):
    """One engine on the bench. ``step`` may raise anything: that is a finding."""

    def add(self, order: Order) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self, throttled: bool = False) -> Report: ...
    def tick(self, seconds: float) -> None: ...
    def pause(self, state: str) -> None:
        """UNPAUSED, PAUSED_NEW or PAUSED_ALL."""
        ...

    def crowd(self, running: int, kv_usage: float) -> None:
        """Another data-parallel rank tells its load."""
        ...

    def silence(self, steps: int) -> None:
        """For so many steps nobody hears which saves are done."""
        ...

    @property
    def silent(self) -> bool:
        """Whether nobody hears of saves at present: their blocks are nobody's, and whoever needs one waits."""
        ...

    def synchronise(self) -> None: ...
    def reset_prefix_cache(self, running: bool, connector: bool) -> bool: ...
    def squeeze(self, blocks: int) -> int: ...
    def relax(self) -> None: ...
    def settle(self, request_id: str, failed: bool) -> str | None:
        """End a transfer. A word on what is wrong with where its KV went or came from, or None."""
        ...

    def close(self) -> None: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def transfers(self) -> list[str]: ...
    @property
    def drafts(self) -> tuple[int, int]:
        """How many drafts were accepted and how many rejected so far."""
        ...

    @property
    def num_running(self) -> int: ...
    @property
    def num_free_blocks(self) -> int: ...
    @property
    def published(self) -> list[dict[str, Any]]:
        """The decisions published since this was last read."""
        ...

    def phase(self, request_id: str) -> str | None: ...
    def references(self) -> list[int]: ...
    def census(self) -> tuple[int, dict[int, tuple[int, int]]]:
        """Blocks that say nobody owns them, and those that are wrong: what they say, and how many own them."""
        ...

    def resident(self, order: Order) -> int:
        """The tokens of a request that does not exist any more of which the engine holds KV."""
        ...

    def orphans(self) -> list[str]: ...
    def blocks_of(self, request_id: str) -> tuple[list[int], ...]: ...
    def known_requests(self) -> list[str]: ...
    def bookkeeping(self) -> dict[str, Any]: ...


class Laboratory(Protocol):
    """Builds engines. ``policies`` is None for the engine's own scheduler; ``faults`` are mutant mix-ins."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    def build(self, cell: Cell, chain: Chain, policies: PolicySet | None, faults: Iterable[type] = ()) -> Engine: ...


def load_laboratory(name: str = "vllm") -> Laboratory:
    """The installed laboratory ``name``. Raises ConfigurationError when it or its engine is missing."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        raise ConfigurationError(
            f"there is no laboratory {name!r}; installed are: {', '.join(sorted(found)) or 'none'}"
        )
    try:
        laboratory: Laboratory = found[name].load()()
    except ImportError as error:
        raise ConfigurationError(
            f"laboratory {name!r} has no engine here: {error}; it needs vLLM (docs/cpu-engines.md); "
            "--tier T0 --tier T1 run without"
        ) from error
    return laboratory
