"""What engine-side policies answer, and the record that is kept of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import Protocol

Fact = int | float | str | bool
_NO_FACTS: Mapping[str, Fact] = MappingProxyType({})


class Verdict(IntEnum):
    """Answers to an admission question, from the mildest to the strictest."""

    ADMIT = 0
    DEFER = 1
    """Not in this step; requests behind it may go first."""
    HOLD = 2
    """No fresh request at all in the rest of this step; requests that hold KV already still go on."""
    REJECT = 3
    """End it with no output. Only a request with the router's mark."""


@dataclass(frozen=True, slots=True)
class Admission:
    """One policy's answer about one request.

    ``reason`` is a short stable code in snake_case: it is shown in traces, counted, and told to the router.
    ``facts`` are the numbers behind the answer. ``whole_lane``, with DEFER, puts off everybody in the request's lane of
    the waiting queue, so that a long lane is not walked in vain.

    Raises TypeError or ValueError for what an engine could not act on.
    """

    verdict: Verdict
    reason: str = ""
    facts: Mapping[str, Fact] = field(default_factory=lambda: _NO_FACTS)
    whole_lane: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.verdict, Verdict):
            raise TypeError(f"a verdict is one of Verdict, not {self.verdict!r}")
        if not (isinstance(self.reason, str) and self.reason.isascii()):
            raise TypeError(f"a reason is a short code such as 'no_usable_prefix', not {self.reason!r}")
        if self.verdict is not Verdict.ADMIT and not self.reason:
            raise ValueError(f"{self.verdict.name} needs a reason: a short code such as 'no_usable_prefix'")
        if not (isinstance(self.facts, Mapping) and all(isinstance(fact, Fact) for fact in self.facts.values())):
            raise TypeError(f"facts are numbers and words by their names, not {self.facts!r}")


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane of the waiting queue. Its requests count as having arrived ``delay`` seconds later than they did."""

    name: str
    delay: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"a lane's name is a word, not {self.name!r}")
        if not (math.isfinite(self.delay) and self.delay >= 0):
            raise ValueError(f"lane {self.name!r} needs a finite delay of zero seconds or more, not {self.delay}")


class Phase(Enum):
    """Kinds of batches. A request with no more than its last token to compute counts as decoding, wherever the KV
    before it came from."""

    PREFILL = "prefill"
    DECODE = "decode"
    EITHER = "either"
    """Whatever comes first, and nothing of the other kind after it."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step's batch may hold. With more decoding requests than ``max_decodes`` they take turns."""

    phase: Phase
    max_decodes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.phase, Phase):
            raise TypeError(f"a plan's phase is one of Phase, not {self.phase!r}")
        if self.max_decodes is not None and (type(self.max_decodes) is not int or self.max_decodes < 1):
            raise ValueError(f"max_decodes is a number from 1 on, or None, not {self.max_decodes!r}")


class Recovery(Enum):
    """Ways to take a running request's KV blocks away, in the order in which an engine tries them."""

    OFFLOAD = "offload"
    """Save its KV to host memory and restore it before it goes on."""
    RETURN = "return"
    """Hand it back to the router, which has it continued elsewhere from the tokens that it has. Only a request that
    the router marked as continuable, and whose next tokens depend on nothing but its tokens."""
    RECOMPUTE = "recompute"
    """vLLM's own way: forget the KV, and compute it again before the request goes on."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one finished step did. ``seconds`` is the time from the end of the step before it to its own end.

    ``prefill_tokens`` counts prompt tokens beyond the one token of each request; ``None`` seconds mean that the engine
    was idle before.
    """

    requests: int
    prefill_tokens: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of one policy, for logs, counters and timelines."""

    request_id: str
    policy: str
    hook: str
    verdict: str
    reason: str
    facts: Mapping[str, Fact]


class DecisionSink(Protocol):
    """Whoever wants to know of decisions."""

    def record(self, decision: Decision) -> None: ...
