"""Faults in saving and restoring the KV of preempted requests."""

from __future__ import annotations

from itertools import islice
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


class HeedsWhoIsAskedFirst:
    """Where two policies name ways for a preempted request, only those of the first are tried."""

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._recover = FirstAnswer(self._recover)


class FirstAnswer:
    """A hook of which only the first answer is heard."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    def ask(self, *arguments: Any) -> Any:
        return islice(self._hook.ask(*arguments), 1)
