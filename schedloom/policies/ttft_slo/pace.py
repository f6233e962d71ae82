"""How long an engine takes to its first byte, learned from the answers that came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DECAY: Final = 0.95
"""What an answer's weight is multiplied by with each answer after it: about twenty answers count."""


@dataclass(slots=True)
class Pace:
    """Seconds as ``base + per_byte * bytes``, fitted by least squares to recent answers; sums are weighted by age."""

    weight: float = 0.0
    size: float = 0.0
    seconds: float = 0.0
    size_squared: float = 0.0
    size_times_seconds: float = 0.0

    def learn(self, size: int, seconds: float) -> None:
        self.weight = DECAY * self.weight + 1
        self.size = DECAY * self.size + size
        self.seconds = DECAY * self.seconds + seconds
        self.size_squared = DECAY * self.size_squared + size * size
        self.size_times_seconds = DECAY * self.size_times_seconds + size * seconds

    def expected(self, size: int) -> float:
        """Never less than nothing, and never falling with ``size``."""
        mean_size, mean_seconds = self.size / self.weight, self.seconds / self.weight
        variance = self.size_squared / self.weight - mean_size**2
        if variance <= 1e-6 * mean_size**2:
            return mean_seconds * max(1.0, size / mean_size) if mean_size else mean_seconds
        slope = max(0.0, (self.size_times_seconds / self.weight - mean_size * mean_seconds) / variance)
        return max(0.0, mean_seconds + slope * (size - mean_size))
