"""What the demo found out, turn by turn."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

ROUTES = ("pd", "append", "fallback")


@dataclass(frozen=True)
class Turn:
    """One request: what was promised, and what the router and the engines say happened.

    Token counts are the engines' own counters; ``exact`` is whether the token ids equal those of an undisturbed engine.
    """

    session: str
    turn: int
    promised_route: str
    route: str
    prompt_tokens: int
    reused_tokens: int
    computed_on_decoder: int
    computed_on_prefiller: int
    ttft_ms: float
    exact: bool

    @property
    def complaint(self) -> str | None:
        if not self.exact:
            return f"session {self.session} turn {self.turn}: the answer differs from the undisturbed engine's"
        if self.route != self.promised_route:
            return f"session {self.session} turn {self.turn}: went by {self.route!r}, not {self.promised_route!r}"
        if self.route == "append" and self.computed_on_prefiller:
            return f"session {self.session} turn {self.turn}: the Prefiller computed for an append"
        return None


@dataclass
class Facts:
    """The whole run."""

    runner: str
    turns: list[Turn] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return bool(self.turns) and all(turn.exact for turn in self.turns)

    @property
    def routes(self) -> dict[str, int]:
        counted = Counter(turn.route for turn in self.turns)
        return {**dict.fromkeys(ROUTES, 0), **counted}

    @property
    def complaints(self) -> list[str]:
        return [turn.complaint for turn in self.turns if turn.complaint]

    def as_json(self) -> dict[str, Any]:
        turns = [asdict(turn) for turn in self.turns]
        for turn in turns:
            del turn["promised_route"]
        return {"runner": self.runner, "exact": self.exact, "routes": self.routes, "turns": turns}
