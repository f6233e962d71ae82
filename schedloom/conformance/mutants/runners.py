"""Faults in how a model runner is told, or understands, what has become of its requests."""

from __future__ import annotations

from typing import Any


class AppendsOnResume:
    """A resumed request's blocks are appended to those that it has lost."""

    target = "runner"

    def _set_blocks(self: Any, row: Any, blocks: Any) -> None:
        if row.num_blocks:
            self._append_blocks(row, blocks)
        else:
            super()._set_blocks(row, blocks)  # type: ignore[misc]


class KeepsOldOffset:
    """A resumed request goes on where it was: only one of two copies of its offset was reset."""

    target = "runner"

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.offsets: dict[str, int] = {}

    def _update(self: Any, output: Any) -> None:
        self.offsets |= {name: row.written for name, row in self.rows.items()}
        super()._update(output)  # type: ignore[misc]
        for new in output.scheduled_new_reqs:
            if self.offsets.get(new.req_id, 0) > new.num_computed_tokens:
                self.rows[new.req_id].computed += 1


class ResumesWithPromptOnly:
    """A resumed request comes with its prompt alone, without what it has said."""

    def schedule(self: Any, *arguments: Any, **keywords: Any) -> Any:
        output = super().schedule(*arguments, **keywords)  # type: ignore[misc]
        for new in output.scheduled_new_reqs:
            if new.prefill_token_ids is not None:
                new.prefill_token_ids = list(new.prompt_token_ids)
        return output


class ForgetsResumedTokens:
    """The last token of a resumed request is missing from what the runner is told."""

    def schedule(self: Any, *arguments: Any, **keywords: Any) -> Any:
        output = super().schedule(*arguments, **keywords)  # type: ignore[misc]
        tokens = output.scheduled_cached_reqs.all_token_ids
        for name in output.scheduled_cached_reqs.resumed_req_ids:
            tokens[name] = [*tokens[name][:-1], 0]
        return output


class HidesResumption:
    """A resumed request is told as if it had never been preempted."""

    def schedule(self: Any, *arguments: Any, **keywords: Any) -> Any:
        output = super().schedule(*arguments, **keywords)  # type: ignore[misc]
        output.scheduled_cached_reqs.resumed_req_ids.clear()
        return output
