"""The time that one request has, and the part of it that a first try may use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Deadline:
    """One timer: it runs until the deadline, or until the first try has used its share of the time that is left.

    It does not keep what it calls: a cycle of references would leave every request to the garbage collector.
    """

    __slots__ = ("_at", "_timer")

    def __init__(self, at: float) -> None:
        self._at = at
        self._timer: asyncio.TimerHandle | None = None

    def left_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self._at - time.monotonic()

    def watch(self, on_passed: Callable[[], None], ratio: float = 1.0) -> None:
        """Call `on_passed` once this ratio of the time that is left is over, and nothing else any more."""
        if self._timer is not None:
            self._timer.cancel()
        wait_s = ratio * (self._at - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(max(0.0, wait_s), on_passed)

    def cancel(self) -> None:
        """Call nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
