"""Requests of the model, and what policies see of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from schedloom.core.decisions import Lane

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Face:
    """A request in the moment in which a policy is asked about it: a RequestView that cannot be written to."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_computed_tokens: int
    is_local_attempt: bool
    job_class: str | None
    session: str | None


@dataclass(eq=False)
class ModelRequest:
    """``answer`` is what it will say, whatever becomes of it. ``arrival`` is in seconds."""

    request_id: str
    prompt: TokenIds
    answer: TokenIds
    arrival: float
    marked: bool = False
    job_class: str | None = None
    session: str | None = None
    lane: Lane | None = None
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    overtaken: int = 0
    served: int = 0
    outcome: str | None = None

    @cached_property
    def tokens(self) -> TokenIds:
        """All that it will ever consist of."""
        return self.prompt + self.answer

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.num_output_tokens

    @property
    def tokens_left(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_fresh(self) -> bool:
        return not (self.num_computed_tokens or self.num_preemptions or self.num_output_tokens)

    def face(self) -> Face:
        return Face(
            self.request_id,
            len(self.prompt),
            self.num_output_tokens,
            self.num_preemptions,
            self.num_computed_tokens,
            self.marked,
            self.job_class,
            self.session,
        )
