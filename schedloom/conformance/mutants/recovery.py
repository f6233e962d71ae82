"""Faults in saving and restoring the KV of preempted requests."""

from __future__ import annotations

from typing import Any


class SavesWrongBlocks:
    """The blocks of a preempted request are saved in the wrong order."""

    def _save(self: Any, request: Any) -> str | None:
        manager = self.kv_cache_manager
        ids = manager.get_block_ids
        manager.get_block_ids = lambda name: tuple(list(reversed(group)) for group in ids(name))
        try:
            return super()._save(request)  # type: ignore[misc, no-any-return]
        finally:
            manager.get_block_ids = ids


class SavesTooMuch:
    """A token whose KV is not written yet is saved with the others, and believed when it is restored."""

    def _save(self: Any, request: Any) -> str | None:
        request.num_computed_tokens += 1
        request.append_output_token_ids(1)
        try:
            return super()._save(request)  # type: ignore[misc, no-any-return]
        finally:
            request.num_computed_tokens -= 1
            request._output_token_ids.pop()
            request._all_token_ids.pop()
