"""Asking policies, and holding what they answer against what they may answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from schedloom.conformance.verdicts import raised
from schedloom.core.composition import PolicySet
from schedloom.core.decisions import Admission, Lane, Recovery, StepPlan

Accuse = Callable[[str, str], None]


def _is_tokens(answer: Any) -> bool:
    return type(answer) is int and answer >= 0


def _is_ways(answer: Any) -> bool:
    return isinstance(answer, Sequence) and all(isinstance(way, Recovery) for way in answer)


_FITTING: dict[str, Callable[[Any], bool]] = {
    "admit": lambda answer: isinstance(answer, Admission),
    "screen": lambda answer: isinstance(answer, Admission),
    "queue_key": lambda answer: isinstance(answer, Lane),
    "recover": _is_ways,
    "limit_tokens": _is_tokens,
    "plan_step": lambda answer: isinstance(answer, StepPlan),
}
"""What each hook may answer beside None. The others are told, and answer nothing."""


class Asking:
    """The hooks of one set of policies. ``acts``: whether anything comes of the answers; ``log`` keeps them all."""

    def __init__(self, policies: PolicySet, acts: bool, accuse: Accuse) -> None:
        self._policies = policies
        self._acts = acts
        self._accuse = accuse
        self.events: Counter[str] = Counter()
        self.log: list[str] = []

    def ask(self, hook: str, *arguments: Any) -> Iterator[tuple[str, Any]]:
        """The answers of all policies that have one, each with its policy's name; none at all in shadow."""
        answers = [
            (each.policy, self._call(each.policy, hook, each.call, arguments)) for each in self._policies.of(hook)
        ]
        given = [(policy, answer) for policy, answer in answers if answer is not None]
        return iter(given if self._acts else ())

    def tell(self, hook: str, *arguments: Any) -> None:
        for _ in self.ask(hook, *arguments):
            pass

    def _call(self, policy: str, hook: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        self.events[f"asked {hook}"] += 1
        try:
            answer = call(*arguments)
        except Exception as error:
            self._accuse("LIVE-3", f"policy {policy} raised in {hook}: {raised(error)}")
            return None
        if answer is not None:
            self.log.append(f"{hook} {policy} {answer!r}")
            if not _FITTING.get(hook, lambda answer: False)(answer):
                self._accuse("ANS-1", f"policy {policy} answered {answer!r} in {hook}"[:300])
                return None
        return answer
