"""How long a process that died waits for its next start, and whether they die too often. Reads no clock."""

from __future__ import annotations

from collections import deque

FIRST_S = 0.1
MOST_S = 5.0
WELL_S = 10.0  # a process that lived so long begins anew with FIRST_S
MANY = 3  # deaths of workers within WINDOW_S that make the instance unready
WINDOW_S = 10.0


class Backoff:
    """Of one process."""

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def after(self, lived_s: float) -> float:
        """Say how long to wait.

        Args:
            lived_s: how long the process lived.
        """
        if lived_s >= WELL_S:
            self._next_s = FIRST_S
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, MOST_S)
        return wait_s


class Deaths:
    """Of all front workers of an instance."""

    def __init__(self) -> None:
        self._at: deque[float] = deque(maxlen=MANY)

    def add(self, now_at: float) -> None:
        """Count one."""
        self._at.append(now_at)

    def are_many(self, now_at: float) -> bool:
        """Whether there were too many of late."""
        return len(self._at) == MANY and now_at - self._at[0] < WINDOW_S
