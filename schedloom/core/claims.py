"""What a policy says about its place among others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import combinations
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from schedloom.core.hooks import hooks_of

if TYPE_CHECKING:
    from schedloom.core.policy import Policy

QUEUE_ORDER: Final = "the order of the waiting queue"
"""Owned by whoever implements ``queue_key``, and by vLLM itself under ``--scheduling-policy priority``."""

STEP_PLAN: Final = "what a step's batch may hold"
"""Owned by whoever implements ``plan_step``: two plans could leave nothing that both allow."""

LOAD_SPREAD: Final = "how load is spread over the engines"
"""Owned by a routing policy that prefers engines for their load: two would average two answers to one question."""

PREFIX_CHOICE: Final = "which engine's cache fits a prompt"
"""Owned by a routing policy that prefers engines for the KV they hold: a guess and better knowledge do not add up."""

_HOOK_OWNERSHIP: Final = {"queue_key": QUEUE_ORDER, "plan_step": STEP_PLAN}

_NOBODY: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Claims:
    """What a policy cannot share, and beside whom it cannot stand.

    ``owns``: what only one policy of a composition may decide, in words that fit after "both decide". Ownership that
    follows from a hook, as that of ``QUEUE_ORDER``, need not be named.
    ``refuses``: names of policies, installed or not, each with the reason why no composition can hold both.
    What a policy needs of its engine is not a claim: see ``Requirements``.
    """

    owns: frozenset[str] = frozenset()
    refuses: Mapping[str, str] = field(default_factory=lambda: _NOBODY)

    def __post_init__(self) -> None:
        if not isinstance(self.owns, Set):
            raise TypeError(f"owns is a set of names, not {self.owns!r}")
        if not isinstance(self.refuses, Mapping):
            raise TypeError(f"refuses has a reason for each name, and is no {type(self.refuses).__name__}")
        for name, reason in self.refuses.items():
            if not reason.strip():
                raise ValueError(f"refusing {name!r} needs a reason: say what goes wrong when both are on")


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two policies that no composition can hold, in the order of their names."""

    first: str
    second: str
    reason: str

    def __str__(self) -> str:
        return f"policies {self.first!r} and {self.second!r} cannot be on together: {self.reason}"


def owned_by(policy: type[Policy]) -> frozenset[str]:
    """What ``policy`` claims for itself alone, by word or by the hooks it implements."""
    return policy.claims.owns | {_HOOK_OWNERSHIP[hook] for hook in hooks_of(policy) if hook in _HOOK_OWNERSHIP}


def conflicts(policies: Sequence[Policy]) -> list[Conflict]:
    """Every reason why ``policies`` cannot stand together; the same for every order of them."""
    ordered = sorted(policies, key=lambda policy: policy.name)
    return [conflict for first, second in combinations(ordered, 2) for conflict in _between(first, second)]


def _between(first: Policy, second: Policy) -> list[Conflict]:
    shared = owned_by(type(first)) & owned_by(type(second))
    reasons = [f"both decide {resource}" for resource in sorted(shared)]
    for one, other in ((first, second), (second, first)):
        if other.name in one.claims.refuses:
            reasons.append(one.claims.refuses[other.name])
    return [Conflict(first.name, second.name, reason) for reason in dict.fromkeys(reasons)]
