"""Engines and requests, as routing policies see them, with no router around."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from schedloom.core.routing import AttemptReport, Candidate, Ending, Held, Leg, Question, RouteRequest
from schedloom.core.wire import EngineContract, Role

CONTRACT = EngineContract(role=Role.BOTH, models=["m"], block_size=16, epoch="first")


@dataclass(eq=False)
class FakeCandidate:
    name: str
    rank: int = 0
    contract: EngineContract = CONTRACT
    in_flight: int = 0
    in_flight_bytes: int = 0
    origin: str = ""


@dataclass
class FakeResidency:
    """What engines say they hold, by their names: of any prompt, and of any session."""

    prompts: dict[str, Held] = field(default_factory=dict)
    sessions: dict[str, Held] = field(default_factory=dict)

    def of_prompt(self, candidate: Candidate, token_ids: Sequence[int], cache_salt: str | None) -> Held | None:
        return self.prompts.get(candidate.name)

    def of_session(self, candidate: Candidate, session: str) -> Held | None:
        return self.sessions.get(candidate.name)


@dataclass
class FakeView:
    now: float = 0.0
    random: Random = field(default_factory=lambda: Random(0))
    residency: FakeResidency = field(default_factory=FakeResidency)


def request(prompt: bytes = b"", salt: str | None = None, size: int | None = None, **hints: str) -> RouteRequest:
    named = {name.replace("_", "-"): value for name, value in hints.items()}
    length = len(prompt) if size is None else size
    return asked(body_bytes=length, hints=named, cache_salt=salt, prompt=prompt)


def asked(**fields: Any) -> RouteRequest:
    return Question(**fields)


def answered(candidate: FakeCandidate, leg: Leg = Leg.PREFILL, seconds: float = 1.0, size: int = 0) -> AttemptReport:
    return AttemptReport(leg, candidate, Ending.ANSWERED, seconds, first_byte=seconds, bytes_before=size)
