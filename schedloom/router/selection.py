"""Who serves a part of a request: the least busy, or whom the policies prefer."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from schedloom.core.composition import Hook, PolicySet
from schedloom.core.routing import Leg, Residency
from schedloom.router.fleet.breaker import Clock
from schedloom.router.fleet.fleet import NO_DOUBTS, Doubts, Fleet, in_turn
from schedloom.router.fleet.worker import Target
from schedloom.router.requests.call import Call
from schedloom.router.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_DIGITS = 9
"""Sums of scores that are equal to so many digits are equal: the rest is how floating point adds."""


@dataclass(slots=True)
class View:
    """What routing policies see beside a request and its candidates."""

    clock: Clock
    residency: Residency
    random: Random

    @property
    def now(self) -> float:
        return self.clock()


class Excuses:
    """Policies that raised are passed over: counted each time, logged once for each hook."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._told: set[tuple[str, str]] = set()

    def note(self, policy: str, what: str) -> None:
        """To be called while the exception is handled."""
        self._metrics.policy_errors.labels(policy).inc()
        if (policy, what) not in self._told:
            self._told.add((policy, what))
            log.exception("policy %s failed to %s; it is passed over", policy, what)


class Selection:
    """Chooses among the engines. Without a policy that filters or scores, the fleet's own choice stands."""

    def __init__(self, fleet: Fleet, policies: PolicySet, excuses: Excuses, view: View) -> None:
        self._fleet = fleet
        self._filters = policies.of("filter_workers")
        self._scorers = [(hook, _weight(policies, hook.policy)) for hook in policies.of("score_workers")]
        self._has_opinions = bool(self._filters or self._scorers)
        self._excuses = excuses
        self._view = view
        self._turns = {leg: itertools.count() for leg in Leg}

    def prefiller(self, call: Call, doubts: Doubts = NO_DOUBTS) -> Target:
        """Raises Failure (503) when there is none."""
        if not self._has_opinions:
            return Target.of(self._fleet.choose_prefiller(doubts))
        return self._choose(call, Leg.PREFILL, self._fleet.best_prefillers(doubts))

    def decoder(self, call: Call, doubts: Doubts = NO_DOUBTS) -> Target:
        """Raises Failure (503) when there is none."""
        if not self._has_opinions:
            return Target.of(self._fleet.choose_decoder(doubts))
        return self._choose(call, Leg.DECODE, self._fleet.best_decoders(doubts))

    def resumer(self, doubts: Doubts) -> Target:
        """A Decoder that continues what others handed back. Raises Failure (503) when there is none."""
        return Target.of(self._fleet.choose_resumer(doubts))

    def has_other_prefillers(self, source: Target) -> bool:
        """Whether others than ``source`` are there."""
        return self._fleet.has_other_prefillers([source.worker])

    def permits(self, call: Call, target: Target) -> bool:
        """Whether no filter leaves ``target`` out for a local attempt."""
        return all(self._left(hook, call, Leg.APPEND, [target]) for hook in self._filters)

    def _choose(self, call: Call, leg: Leg, targets: list[Target]) -> Target:
        for hook in self._filters:
            targets = self._left(hook, call, leg, targets) or targets
        if len(targets) == 1:
            return targets[0]
        sums = self._sums(call, leg, targets)
        return in_turn(
            targets, [(-total, one.in_flight) for total, one in zip(sums, targets, strict=True)], next(self._turns[leg])
        )

    def _left(self, hook: Hook, call: Call, leg: Leg, targets: list[Target]) -> list[Target]:
        try:
            kept = hook.call(call, leg, tuple(targets), self._view)
            return targets if kept is None else [target for target in targets if target in kept]
        except Exception:
            self._excuses.note(hook.policy, "filter workers")
            return targets

    def _sums(self, call: Call, leg: Leg, targets: Sequence[Target]) -> list[float]:
        sums, candidates = [0.0] * len(targets), tuple(targets)
        for hook, weight in self._scorers:
            try:
                scores = hook.call(call, leg, candidates, self._view)
                if scores is not None:
                    sums = [total + weight * _checked(score) for total, score in zip(sums, scores, strict=True)]
            except Exception:
                self._excuses.note(hook.policy, "score workers")
        return [round(total, _DIGITS) for total in sums]


def _checked(score: float) -> float:
    if not (math.isfinite(score) and 0 <= score <= 1):
        raise ValueError(f"a score is a number from 0 to 1, not {score!r}")
    return score


def _weight(policies: PolicySet, name: str) -> float:
    policy = next(policy for policy in policies.policies if policy.name == name)
    return float(getattr(policy.settings, "weight", 1.0))
