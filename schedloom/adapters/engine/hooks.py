"""Calling policies from inside an engine: a policy that raises must not stop it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from schedloom.core.composition import PolicySet

logger = logging.getLogger("vllm.schedloom")


class HookCaller:
    """One hook of all policies that implement it, resolved once."""

    __slots__ = ("_hooks", "_name", "_reported", "failures")

    def __init__(self, policies: PolicySet, name: str) -> None:
        self._hooks = policies.of(name)
        self._name = name
        self._reported: set[str] = set()
        self.failures: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def ask(self, *arguments: Any) -> Iterator[tuple[str, Any]]:
        """The answers of those who have one, each with its policy's name.

        Who raises has no opinion: the engine goes on as if it had not been asked. Counted in ``failures``, logged
        once for each policy.
        """
        for hook in self._hooks:
            try:
                answer = hook.call(*arguments)
            except Exception:
                self._note_failure(hook.policy)
                continue
            if answer is not None:
                yield hook.policy, answer

    def tell(self, *arguments: Any) -> None:
        """Call everybody, whatever they answer."""
        for _ in self.ask(*arguments):
            pass

    def _note_failure(self, policy: str) -> None:
        self.failures[policy] = self.failures.get(policy, 0) + 1
        if policy not in self._reported:
            self._reported.add(policy)
            logger.exception("policy %s raised in %s; it is ignored whenever it raises", policy, self._name)
