"""Who is left out for a while, and how much may be tried again."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]

CONSECUTIVE_FAILURES = 5
BASE_SECONDS = 30.0
LONGEST_SECONDS = 300.0

SUCCESSES_FOR_A_FAILURE = 4
"""One that fails a fifth of its requests keeps the balance; so many second tries are made at most."""

_TOO_MUCH_DEBT = CONSECUTIVE_FAILURES * SUCCESSES_FOR_A_FAILURE


def _nothing(seconds: float | None) -> None:
    """Whom nobody asked for news."""


class Breaker:
    """Leaves a worker out after ``CONSECUTIVE_FAILURES``, for longer each time it fails again. Where successes come in
    between, each makes up for a part of a failure, so that one that flaps is left out as well.

    When its time is over a single request may try it: success brings it back, failure leaves it out again. What fails
    before that, as all that was under way when it died, is of the same trouble.

    ``tell`` is called with the seconds for which it is left out, and with None when it is back.
    """

    def __init__(self, clock: Clock, tell: Callable[[float | None], None] = _nothing) -> None:
        self.opened_at = 0.0
        self.is_open = False
        self.is_clean = True
        self._clock = clock
        self._tell = tell
        self._debt = 0
        self._pause = BASE_SECONDS
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
            if self.is_open:
                self._tell(None)
            self._debt = 0 if self.is_open else max(0, self._debt - 1)
            self.is_open, self.is_clean = False, self._debt == 0
            self._pause = BASE_SECONDS if self.is_clean else self._pause
        elif success is False:
            self.is_clean = False
            self._debt += SUCCESSES_FOR_A_FAILURE
            if self._clock() >= self._open_until if self.is_open else self._debt >= _TOO_MUCH_DEBT:
                self._open()

    def _open(self) -> None:
        self.is_open = True
        self.opened_at = self._clock()
        self._open_until = self.opened_at + self._pause
        self._tell(self._pause)
        self._pause = min(2 * self._pause, LONGEST_SECONDS)


class RetryBudget:
    """Second tries are at most a share of the requests of the last seconds, so that trouble does not feed itself.

    Where few requests come, so many may be ``saved`` of the same share of earlier ones as it takes to leave out one
    engine of each role. The ``least`` that there may be without requests are owed to later ones.
    """

    def __init__(
        self,
        clock: Clock,
        share: float = 0.2,
        least: int = 3,
        window: float = 10.0,
        saved: float = 2.0 * CONSECUTIVE_FAILURES,
    ) -> None:
        self._clock = clock
        self._share = share
        self._least = least
        self._window = window
        self._begun = clock()
        self._turns_at = self._begun + window / 2
        self._requests = [0, 0]
        self._retries = [0, 0]
        self._most_saved = saved
        self._saved = 0.0
        self._counted = 0

    def count_request(self) -> None:
        if self._clock() >= self._turns_at:
            self._turn()
        self._requests[0] += 1

    def take(self) -> bool:
        """Whether one more second try is within the budget; if so it is spent."""
        self._turn()
        self._save()
        if sum(self._retries) + 1 > max(self._least, self._share * sum(self._requests)) and self._saved < 1:
            return False
        self._spend()
        return True

    def owe(self) -> None:
        """Work was done again that could not wait for the budget: later second tries pay for it."""
        self._turn()
        self._save()
        self._spend()

    def _spend(self) -> None:
        self._retries[0] += 1
        self._saved = max(-float(self._least), self._saved - 1)

    def _save(self) -> None:
        """Of the requests since it was last done."""
        self._saved = min(self._most_saved, self._saved + self._share * (self._requests[0] - self._counted))
        self._counted = self._requests[0]

    def _turn(self) -> None:
        """The window is made of two halves: the older one is dropped when the newer one is full."""
        passed = self._clock() - self._begun
        if passed < self._window / 2:
            return
        self._save()
        self._counted = 0
        kept = passed < self._window
        self._requests = [0, self._requests[0] if kept else 0]
        self._retries = [0, self._retries[0] if kept else 0]
        self._begun = self._clock()
        self._turns_at = self._begun + self._window / 2
