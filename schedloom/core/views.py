"""What policies may see of an engine: read-only, and paid for only when asked."""

from __future__ import annotations

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


class EngineView(Protocol):
    """An engine, as a policy sees it while the scheduler runs."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_decoding(self) -> int:
        """Running requests whose prefill is through."""
        ...

    def reusable_kv(self, request: RequestView) -> ReusableKV:
        """Look up the KV that ``request`` could reuse. Changes nothing; remembered until the step moves on."""
        ...
