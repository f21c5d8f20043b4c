"""Wrong keys of one process: over a rate, the answers to them are held back, so that whoever tries keys waits.

A right key is never held back. A wrong one is answered at once while there are few of them, so that a caller with a
misspelt key sees why without a wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from npu_gr.core.bucket import TokenBucket

RATE_PER_S = 10.0  # wrong keys that are answered at once
BURST = 20.0
HOLD_S = 1.0
MAX_HELD = 1000  # answers: to hold one costs a connection, so the ones over this limit leave at once


class Throttle:
    """Counts wrong keys."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with nothing counted.

        Args:
            clock: seconds that never go back.
        """
        self._clock = clock
        self._bucket = TokenBucket(RATE_PER_S, BURST)
        self._held: deque[float] = deque()  # when each answer that is held back leaves, in order

    def hold_s(self) -> float:
        """Count one wrong key. Returns for how long its answer is to be held back, mostly 0."""
        now_at = self._clock()
        while self._held and self._held[0] <= now_at:
            self._held.popleft()
        if self._bucket.take(now_at) or len(self._held) >= MAX_HELD:
            return 0.0
        self._held.append(now_at + HOLD_S)
        return HOLD_S
