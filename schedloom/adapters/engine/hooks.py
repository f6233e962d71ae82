"""Calling policies from inside an engine: one that raises must not stop it, and one may be switched at any time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from schedloom.adapters.engine.shadow import ShadowView
from schedloom.core.composition import Hook, PolicySet
from schedloom.core.decisions import Admission, Lane, Recovery, StepPlan

logger = logging.getLogger("vllm.schedloom")


class HookCaller:
    """One hook of all policies that implement it, resolved once.

    ``counts`` has what nobody else records, by policy, hook, outcome and detail: failures, and the answers of policies
    in shadow.
    """

    __slots__ = ("_acting", "_check", "_hooks", "_name", "_reported", "_shadows", "counts", "is_on")

    def __init__(self, policies: PolicySet, name: str) -> None:
        self._name = name
        self._check = _CHECKS.get(name)
        self._hooks = policies.of(name)
        self._reported: set[str] = set()
        self.counts: Counter[tuple[str, str, str, str]] = Counter()
        self.set_modes({})

    @property
    def acts(self) -> bool:
        """Whether anybody's answer has an effect."""
        return bool(self._acting)

    def set_modes(self, modes: Mapping[str, str], otherwise: str = "on") -> None:
        """Who acts, and who only decides; ``otherwise`` is the mode of a policy that ``modes`` does not name."""
        self._acting = tuple(hook for hook in self._hooks if modes.get(hook.policy, otherwise) == "on")
        self._shadows = tuple(hook for hook in self._hooks if modes.get(hook.policy, otherwise) == "shadow")
        self.is_on = bool(self._acting or self._shadows)

    def ask(self, *arguments: Any) -> Iterator[tuple[str, Any]]:
        """The answers of those who act and have one, each with its policy's name. The last argument is the view.

        Who raises, or answers what is no answer to this hook, has no opinion: the engine goes on as if it had not been
        asked. Logged once for each policy.
        """
        for hook in self._acting:
            answer = self._call(hook, arguments)
            if answer is not None:
                yield hook.policy, answer
        if self._shadows:
            self._ask_shadows(arguments)

    def tell(self, *arguments: Any) -> None:
        """Call everybody, whatever they answer."""
        for hook in self._acting:
            self._call(hook, arguments)
        if self._shadows:
            self._ask_shadows(arguments)

    def _ask_shadows(self, arguments: tuple[Any, ...]) -> None:
        for hook in self._shadows:
            answer = self._call(hook, (*arguments[:-1], ShadowView(arguments[-1])))
            if answer is not None:
                self.counts[hook.policy, self._name, "SHADOW", describe(answer)] += 1

    def _call(self, hook: Hook, arguments: tuple[Any, ...]) -> Any:
        try:
            answer = hook.call(*arguments)
            return answer if self._check is None else self._check(answer)
        except Exception as error:
            self._note_failure(hook.policy, error)
            return None

    def _note_failure(self, policy: str, error: Exception) -> None:
        self.counts[policy, self._name, "FAILED", type(error).__name__] += 1
        if policy not in self._reported:
            self._reported.add(policy)
            logger.exception("policy %s raised in %s; it is ignored whenever it raises", policy, self._name)


def _of(kind: type) -> Callable[[Any], Any]:
    def check(answer: Any) -> Any:
        if answer is not None and (not isinstance(answer, kind) or isinstance(answer, bool)):
            raise TypeError(f"the answer must be a {kind.__name__} or None, not {answer!r}")
        return answer

    return check


def _limit(answer: Any) -> Any:
    if _of(int)(answer) is not None and answer < 0:
        raise ValueError(f"the answer must be a number of tokens or None, not {answer}")
    return answer


def _ways(answer: Any) -> Any:
    """The whole list now: one that is made while it is read could raise where nobody expects it."""
    ways = None if answer is None else tuple(answer)
    for way in ways or ():
        _of(Recovery)(way)
    return ways


_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "admit": _of(Admission),
    "screen": _of(Admission),
    "queue_key": _of(Lane),
    "recover": _ways,
    "limit_tokens": _limit,
    "plan_step": _of(StepPlan),
}


def describe(answer: Any) -> str:
    """A short name for an answer, of which there are few: it becomes a label of a metric."""
    return f"{answer.verdict.name}:{answer.reason}" if isinstance(answer, Admission) else type(answer).__name__
