"""A circuit breaker: after failures, calls are refused at once, and one now and then tries whether it is over.

    closed ── failures in a row, or half of the newest ones ──> open ── retry_s ──> one probe
      ▲                                                          ▲                    │
      │                                                          └────── it fails ────┤
      └──────────────────────────── it succeeds ──────────────────────────────────────┘

Pure but for its clock. A call that passed while the breaker was closed does not count once it is open: only a probe
says how things are now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

NEWEST = 20  # calls, of which half must fail to open a breaker whose calls do not fail in a row


class StoreBreaker:
    """Says whether a call may be made. Each one that may must be reported once, by its pass."""

    def __init__(self, max_failures: int, retry_s: float, clock: Callable[[], float]) -> None:
        """Begin closed.

        Args:
            max_failures: in a row; the last of them opens it.
            retry_s: after a failure, until the next probe.
            clock: seconds that never go back.
        """
        self._max_failures = max_failures
        self._retry_s = retry_s
        self._clock = clock
        self._newest: deque[bool] = deque(maxlen=max(NEWEST, max_failures))  # True = failed
        self._in_a_row = 0
        self._retry_at: float | None = None  # None = closed
        self._is_probing = False
        self._era = 0  # changes whenever it opens or closes

    @property
    def is_open(self) -> bool:
        """Whether calls other than probes are refused."""
        return self._retry_at is not None

    def enter(self) -> int | None:
        """Return the pass of a call that may be made, or None if it may not."""
        if self._retry_at is not None:
            if self._is_probing or self._clock() < self._retry_at:
                return None
            self._is_probing = True
        return self._era

    def succeeded(self, era: int) -> bool:
        """Report that the call with this pass did its part; True = that closed the breaker."""
        if era != self._era:
            return False
        if self._retry_at is not None:
            self._turn(None)
            return True
        self._in_a_row = 0
        self._newest.append(False)
        return False

    def failed(self, era: int) -> bool:
        """Report that the call with this pass failed or took too long; True = that opened the breaker."""
        if era != self._era:
            return False
        if self._retry_at is not None:
            self._retry_at = self._clock() + self._retry_s
            self._is_probing = False
            return False
        self._in_a_row += 1
        self._newest.append(True)
        half = len(self._newest) == self._newest.maxlen and sum(self._newest) * 2 >= len(self._newest)
        if self._in_a_row < self._max_failures and not half:
            return False
        self._turn(self._clock() + self._retry_s)
        return True

    def given_up(self, era: int) -> None:
        """Report that the call with this pass was not made, or says nothing about the dependency."""
        if era == self._era:
            self._is_probing = False

    def _turn(self, retry_at: float | None) -> None:
        self._retry_at = retry_at
        self._is_probing = False
        self._in_a_row = 0
        self._newest.clear()
        self._era += 1
