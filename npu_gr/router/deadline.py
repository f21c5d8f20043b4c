"""The time that one request has, and the part of it that a first try may use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Deadline:
    """One timer: it runs until the deadline, or until the first try has used its share of the time that is left."""

    __slots__ = ("_at", "_on_passed", "_timer")

    def __init__(self, at: float, on_passed: Callable[[], None]) -> None:
        self._at = at
        self._on_passed = on_passed
        self._timer: asyncio.TimerHandle | None = None

    def left_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self._at - time.monotonic()

    def watch(self) -> None:
        """Call `on_passed` at the deadline."""
        self._arm(self.left_s(), self._on_passed)

    def watch_first_try(self, ratio: float, on_passed: Callable[[], None]) -> None:
        """Call another function once this ratio of the time that is left is over; it calls `watch` again."""
        self._arm(self.left_s() * ratio, on_passed)

    def cancel(self) -> None:
        """Call nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, wait_s: float, call: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, wait_s), call)
