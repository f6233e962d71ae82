"""What a step costs, learned from the steps that ran."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.97
"""What a step's weight is multiplied by with each step after it: about thirty steps count."""

TRUST = 2.0
"""Predictions reach this many times as far as the largest recent chunk, no further."""


@dataclass
class StepCost:
    """Seconds of a step as ``decodes + per_token * prefill_tokens``, fitted by least squares to recent steps.

    The sums are of steps weighted by their age. ``largest`` is the largest recent chunk of prefill.
    """

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    tokens_times_seconds: float = 0.0
    largest: float = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        self.weight = DECAY * self.weight + 1
        self.tokens = DECAY * self.tokens + tokens
        self.seconds = DECAY * self.seconds + seconds
        self.tokens_squared = DECAY * self.tokens_squared + tokens * tokens
        self.tokens_times_seconds = DECAY * self.tokens_times_seconds + tokens * seconds
        self.largest = max(DECAY * self.largest, tokens)

    def tokens_within(self, seconds: float) -> int | None:
        """Prefill tokens that fit into a step of ``seconds`` beside its decodes; ``None`` when nothing is known."""
        if not self.tokens:
            return None
        decodes, per_token = self._fit()
        return int(max(0.0, min((seconds - decodes) / per_token, TRUST * self.largest)))

    def _fit(self) -> tuple[float, float]:
        spread = self.weight * self.tokens_squared - self.tokens**2
        rise = self.weight * self.tokens_times_seconds - self.tokens * self.seconds
        at_most = max(self.seconds, 1e-9) / self.tokens
        if spread < 1e-6 * self.tokens**2:
            # Chunks of one size tell the two parts not apart: counting all time as prefill errs on the safe side.
            return 0.0, at_most
        if rise <= 0:
            # Noise: what neither part can exceed.
            return self.seconds / self.weight, at_most
        per_token = rise / spread
        return max(0.0, (self.seconds - per_token * self.tokens) / self.weight), per_token
