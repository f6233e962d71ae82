"""Who is left out for a while, and how much may be tried again."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]

CONSECUTIVE_FAILURES = 5
BASE_SECONDS = 30.0
LONGEST_SECONDS = 300.0


class Breaker:
    """Leaves a worker out after ``CONSECUTIVE_FAILURES``, for longer each time it fails again.

    When its time is over a single request may try it: success brings it back, failure leaves it out again.
    """

    def __init__(self, clock: Clock) -> None:
        self.opened_at = 0.0
        self.is_open = False
        self.is_clean = True
        self._clock = clock
        self._failures = 0
        self._openings = 0
        self._open_until = 0.0
        self._probing = False

    @property
    def allows(self) -> bool:
        return not self.is_open or (self._clock() >= self._open_until and not self._probing)

    def begin(self) -> None:
        self._probing = self.is_open

    def end(self, success: bool | None) -> None:
        """``None`` for a request that says nothing about the worker."""
        self._probing = False
        if success:
            self._failures = self._openings = 0
            self.is_open, self.is_clean = False, True
        elif success is False:
            self.is_clean = False
            self._failures += 1
            if self._failures >= CONSECUTIVE_FAILURES:
                self._open()

    def _open(self) -> None:
        self.is_open = True
        self.opened_at = self._clock()
        self._open_until = self.opened_at + min(BASE_SECONDS * 2**self._openings, LONGEST_SECONDS)
        self._openings += 1


class RetryBudget:
    """Second tries are at most a share of the requests of the last seconds, so that trouble does not feed
    itself.
    """

    def __init__(self, clock: Clock, share: float = 0.2, least: int = 3, window: float = 10.0) -> None:
        self._clock = clock
        self._share = share
        self._least = least
        self._window = window
        self._begun = clock()
        self._requests = [0, 0]
        self._retries = [0, 0]

    def count_request(self) -> None:
        if self._clock() - self._begun >= self._window / 2:
            self._turn()
        self._requests[0] += 1

    def take(self) -> bool:
        """Whether one more second try is within the budget; if so it is spent."""
        self._turn()
        if sum(self._retries) >= max(self._least, self._share * sum(self._requests)):
            return False
        self._retries[0] += 1
        return True

    def _turn(self) -> None:
        """The window is made of two halves: the older one is dropped when the newer one is full."""
        passed = self._clock() - self._begun
        if passed < self._window / 2:
            return
        kept = passed < self._window
        self._requests = [0, self._requests[0] if kept else 0]
        self._retries = [0, self._retries[0] if kept else 0]
        self._begun = self._clock()
