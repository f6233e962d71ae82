"""What befalls an engine now and then, whatever the weather."""

from __future__ import annotations

import random

from schedloom.conformance import script, subjects
from schedloom.conformance.bench import Bench

ADAPTERS = 3
RATES = (0.0, 0.0, 0.01, 0.04)


class Troubles:
    """Draws from a random source of its own, so that the weather is the same with troubles and without."""

    def __init__(self, bench: Bench, rng: random.Random, climate: str, calm: bool) -> None:
        self._bench, self._rng = bench, rng
        cell, unsettled = bench.cell, climate == "unsettled"
        self._rates = {
            self._pause: 0.03 if unsettled else rng.choice(RATES),
            self._wait: rng.choice(RATES),
            self._crowd: 0.15 if subjects.reads_peers(cell.policies) else 0.0,
            self._lose: rng.choice(RATES) if cell.role != "none" else 0.0,
            self._silence: rng.choice(RATES) if cell.offload else 0.0,
        }
        self._rates = {} if calm else self._rates
        self._full: script.Act | None = None
        self._again = 0
        self._throttled = 0.0 if calm else rng.choice((0.0, 0.0, 0.5))

    def next(self) -> script.Act | None:
        if self._bench.paused and self._rng.random() < 0.2:
            return script.Resume()
        if self._again:
            self._again -= 1
            if self._again % 2:
                return self._full
        for trouble, rate in self._rates.items():
            if rate and self._rng.random() < rate:
                return trouble()
        return None

    def throttles(self) -> bool:
        return self._rng.random() < self._throttled

    def adapter(self) -> int:
        return self._rng.randrange(ADAPTERS) + 1 if self._rng.random() < 0.5 else 0

    def _pause(self) -> script.Act:
        return script.Pause(new_only=self._rng.random() < 0.5)

    def _wait(self) -> script.Act:
        return script.Wait(self._rng.choice((0.5, 5.0, 60.0)))

    def _crowd(self) -> script.Act:
        """Another rank is full, sometimes for long; or it is not."""
        if self._rng.random() < 0.4:
            return script.Crowd(1, 0.2)
        most = self._bench.cell.max_num_seqs
        self._full = self._rng.choice((script.Crowd(most, 0.2), script.Crowd(1, 0.99)))
        self._again = self._rng.choice((0, 0, 60))
        return self._full

    def _lose(self) -> script.Act:
        return script.Lose()

    def _silence(self) -> script.Act:
        return script.Silence(self._rng.choice((1, 5, 60)))
