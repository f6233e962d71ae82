"""The usable prefix: the one definition of when a Decoder may prefill a request by itself."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schedloom.core.policy import PolicySettings
from schedloom.core.views import ReusableKV


class UsablePrefixRule(PolicySettings):
    """A prefix is usable when enough of it need not be computed, and little enough is left to compute.

    The defaults come from the agentic sessions behind ``docs/append-prefill.md``: 90% of the follow-up turns there
    reuse at least 95% of a prompt of 100,000 tokens, and 77% append fewer than 2,048 tokens.
    """

    min_reused_tokens: Annotated[int, Field(ge=1)] = 128
    """Tokens, resident or restorable, that must not need computing. It sorts out attempts with nothing to gain."""

    max_append_tokens: Annotated[int, Field(ge=1)] = 2048
    """Tokens that may be left to compute. A longer suffix would stall the Decoder's streams; it is a Prefiller's."""

    def allows(self, num_prompt_tokens: int, reused_tokens: int) -> bool:
        return reused_tokens >= self.enough(num_prompt_tokens)

    def enough(self, num_prompt_tokens: int) -> int:
        """The reused tokens from which on a prompt's prefix is usable."""
        return max(self.min_reused_tokens, num_prompt_tokens - self.max_append_tokens)

    def is_hopeless(self, num_prompt_tokens: int, reusable: ReusableKV) -> bool:
        """Whether the prefix is not usable now. Not so while a connector still looks for restorable tokens."""
        if self.allows(num_prompt_tokens, reusable.known_tokens):
            return False
        return reusable.restorable is not None
