"""When an instance is taken out for what it does, and how it comes back. Pure: the clock is an argument.

closed -> open: `failures` in a row, or too slow for too long. open -> returning when its time is over: a growing
share of its users, always the same ones first. returning -> closed at the end, or -> open again, for twice as long.
"""

from __future__ import annotations

from npu_gr.router.config import BreakerConfig


class Breaker:
    """Of one instance. Times are instants of one monotonic clock, in seconds."""

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._failures = 0  # in a row
        self._slow = 0  # intervals in a row
        self._open_s = config.open_s  # of the next time
        self._until_s = 0.0  # open before that
        self._returned_s = 0.0  # whole after that
        self._returning_s = 0.0  # how long that takes

    def succeeded(self, now_at: float) -> None:
        """An answer came."""
        self._failures = 0
        if now_at >= self._returned_s:
            self._open_s = self._config.open_s

    def failed(self, now_at: float) -> bool:
        """None came. Whether that is one too many, or one while it returns."""
        self._failures += 1
        return not self.is_open(now_at) and (
            self._failures >= self._config.failures or (self._until_s > 0 and now_at < self._returned_s)
        )

    def was_slow(self, is_slow: bool) -> bool:
        """One interval's verdict. Whether it has been too slow for too long."""
        self._slow = self._slow + 1 if is_slow else 0
        return self._slow >= self._config.slow_intervals

    def open(self, now_at: float) -> float:
        """Take it out; for how long."""
        out_s = self._open_s
        self._failures = self._slow = 0
        self._open_s = min(2 * out_s, self._config.max_open_s)
        self._until_s = now_at + out_s
        self._return(self._until_s)
        return out_s

    def come_back(self, now_at: float) -> None:
        """It was down and is up: nothing of before counts, its users return slowly."""
        self._failures = self._slow = 0
        self._until_s = 0.0
        self._return(now_at)

    def _return(self, from_s: float) -> None:
        self._returning_s = self._config.return_s
        self._returned_s = from_s + self._returning_s

    def is_open(self, now_at: float) -> bool:
        """Whether it gets nothing."""
        return now_at < self._until_s

    def share(self, now_at: float) -> float:
        """Share of its users that it gets: 0 while open, growing in a line to 1 while it returns."""
        if now_at < self._until_s:
            return 0.0
        if now_at >= self._returned_s:
            return 1.0
        done = 1 - (self._returned_s - now_at) / self._returning_s
        return self._config.return_share + (1 - self._config.return_share) * done
