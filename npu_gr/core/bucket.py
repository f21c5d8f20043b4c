"""A token bucket: a rate in the long run, of which some may come at once."""

from __future__ import annotations

import math


class TokenBucket:
    """Limits a rate to `rate_per_s` takes a second, of which `burst` may come at once."""

    def __init__(self, rate_per_s: float, burst: float) -> None:
        """Begin full.

        Args:
            rate_per_s: tokens that come in.
            burst: tokens that it holds at most; less than 1 is 1, else nobody could ever take one.
        """
        self.rate_per_s = rate_per_s
        self.burst = max(burst, 1.0)
        self._level = self.burst
        self._filled_at = -math.inf  # no take yet

    def take(self, now_at: float) -> bool:
        """Take one token at an instant of any clock that never goes back. Returns False if there is none."""
        if self._filled_at > -math.inf:
            self._level = min(self.burst, self._level + (now_at - self._filled_at) * self.rate_per_s)
        self._filled_at = now_at
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True
