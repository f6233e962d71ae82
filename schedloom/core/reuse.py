"""The usable prefix: the one definition of when a Decoder may prefill a request by itself."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from schedloom.core.views import ReusableKV


class UsablePrefixRule(BaseModel):
    """A prefix is usable when enough of it need not be computed, and little enough is left to compute.

    ``min_reused_tokens``: reused tokens (resident plus restorable) must reach this. It only sorts out attempts that
    have nothing to gain; in the agentic sessions behind ``docs/append-prefill.md`` 90% of follow-up turns reuse at
    least 95% of a prompt of 100,000 tokens.
    ``max_append_tokens``: the suffix left to compute must not exceed this. 77% of the follow-up turns measured there
    append fewer than 2,048 tokens; longer suffixes belong to a Prefiller, because they stall the Decoder's streams.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_reused_tokens: Annotated[int, Field(ge=1)] = 128
    max_append_tokens: Annotated[int, Field(ge=1)] = 2048

    def allows(self, num_prompt_tokens: int, reused_tokens: int) -> bool:
        append_tokens = num_prompt_tokens - reused_tokens
        return reused_tokens >= self.min_reused_tokens and append_tokens <= self.max_append_tokens

    def is_hopeless(self, num_prompt_tokens: int, reusable: ReusableKV) -> bool:
        """Whether the prefix is not usable now. Not so while a connector still looks for restorable tokens."""
        if self.allows(num_prompt_tokens, reusable.known_tokens):
            return False
        return reusable.restorable is not None
