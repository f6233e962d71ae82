"""What policies may see of an engine: read-only, and paid for only when asked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReusableKV:
    """KV that an engine would not have to compute for one request.

    ``resident``: tokens, a multiple of the block size, whose KV is in the engine's prefix cache now.
    ``restorable``: tokens beyond ``resident`` that a KV connector can load; ``None`` while it does not know yet.
    """

    resident: int
    restorable: int | None

    @property
    def known_tokens(self) -> int:
        return self.resident + (self.restorable or 0)


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """What another data-parallel rank on this host said of itself ``age`` seconds ago."""

    rank: int
    age: float
    running: int
    waiting: int
    max_running: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What became of a step's plan: how many requests its batch had, and which kinds were asked for and left out."""

    requests: int = 1
    left_out_prefill: bool = False
    left_out_decode: bool = False


class RequestView(Protocol):
    """A request, as a policy sees it."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def is_local_attempt(self) -> bool:
        """Whether the router marked it as an attempt that it can repeat through a Prefiller."""
        ...

    @property
    def job_class(self) -> str | None:
        """The class of work that the client or the router gave it, if that is a well-formed name."""
        ...

    @property
    def session(self) -> str | None:
        """The conversation that it is a turn of, where the client or the router named one."""
        ...


class Blocks(Protocol):
    """KV blocks as a request left them; nothing is kept from being reused by knowing them."""

    def __len__(self) -> int: ...


class PoolView(Protocol):
    """The pool of KV blocks. Free blocks still hold the prefix cache, and are reused in the order they came in."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_taken(self) -> int:
        """Free blocks taken into use since somebody first looked at the pool."""
        ...

    def blocks_of(self, request: RequestView) -> Blocks:
        """The blocks of ``request`` that the prefix cache knows."""
        ...

    def refresh(self, blocks: Blocks) -> int:
        """Put those of ``blocks`` that are free, and hold what they held, behind all other free blocks.

        Returns how many still hold what they held, in use or not; the others are forgotten.
        """
        ...


class EngineView(Protocol):
    """An engine, as a policy sees it while the scheduler runs."""

    @property
    def now(self) -> float:
        """Seconds of a monotonic clock: the only clock that a policy may read."""
        ...

    @property
    def block_size(self) -> int: ...
    @property
    def num_decoding(self) -> int:
        """Running requests whose prefill is through."""
        ...

    @property
    def num_prefilling(self) -> int:
        """Running requests whose prefill goes on."""
        ...

    @property
    def prefill_throttled(self) -> bool:
        """Whether prefill waits for another step while anybody decodes: so data-parallel ranks keep in step."""
        ...

    @property
    def last_batch(self) -> BatchReport:
        """Of the step before this one; known only where a policy plans steps."""
        ...

    @property
    def pool(self) -> PoolView: ...

    @property
    def peers(self) -> Sequence[PeerLoad]:
        """The other ranks that have said something, for policies with ``reads_peers``.

        Read outside any collective. A rank that is idle, gone or on another host falls silent or was never heard.
        """
        ...

    def num_active(self, job_classes: Collection[str]) -> int:
        """Requests of these classes that hold KV. Looks at every running request."""
        ...

    def reusable_kv(self, request: RequestView, enough: int | None = None) -> ReusableKV:
        """Look up the KV that ``request`` could reuse. Changes nothing; remembered until the step moves on.

        Where ``enough`` tokens are resident, no connector is asked, and ``restorable`` is 0: the question can cost a
        look at a disk.
        """
        ...
