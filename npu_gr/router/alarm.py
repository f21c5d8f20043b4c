"""One timer for everything that one connection waits for.

A deadline is set for each request and hardly ever passes. So the timer is not moved when a request ends: it rings at
the earliest instant that was ever asked for, finds that nothing is due, and is set for the next one. On a busy
connection that is once in a while instead of twice a request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

NEVER = float("inf")


class Alarm:
    """Rings at or before the instants that it was asked for."""

    __slots__ = ("_at", "_on_ring", "_timer")

    def __init__(self, on_ring: Callable[[float], float]) -> None:
        """Make an alarm that is not set.

        Args:
            on_ring: does what is due at the instant (of the monotonic clock), and returns the next one or NEVER.
        """
        self._on_ring = on_ring
        self._at = NEVER
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at: float) -> None:
        """Ring at this instant of the monotonic clock, or earlier."""
        if at < self._at:
            self.cancel()
            self._at = at
            wait_s = max(0.0, at - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._ring)

    def cancel(self) -> None:
        """Ring no more."""
        self._at = NEVER
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._at = NEVER
        self._timer = None
        self.set(self._on_ring(time.monotonic()))
