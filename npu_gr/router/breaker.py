"""A circuit breaker for one instance: takes it out when it fails or is slow, and lets its users return gradually.

Pure: the clock is an argument. Every instant is of one monotonic clock, in seconds.

              `failures` in a row, or slow for `slow_intervals`
    CLOSED ────────────────────────────────────────────────► OPEN ◄─────────────┐
      ▲                                                       │                 │ one failure: open again,
      │                                              open_s is over             │ for twice as long
      │                  return_s is over                     ▼                 │ (up to `max_open_s`)
      └────────────────────────────────────────────────── RETURNING ────────────┘

While it returns, an instance gets a share of its users that grows linearly from `return_share` to 1; a user who is in
the share stays in it. An instance that was down and is up again starts at RETURNING.
"""

from __future__ import annotations

from npu_gr.router.config import BreakerConfig


class Breaker:
    """The breaker of one instance."""

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._num_failures = 0  # in a row
        self._num_slow = 0  # slow intervals in a row
        self._next_open_s = config.open_s  # how long it opens the next time
        self._open_until_at = 0.0
        self._returned_at = 0.0  # the end of RETURNING

    def succeeded(self, now_at: float) -> None:
        """Record an answer."""
        self._num_failures = 0
        if now_at >= self._returned_at:
            self._next_open_s = self._config.open_s

    def failed(self, now_at: float) -> bool:
        """Record a failure.

        Returns:
            Whether the breaker should open: this is one failure too many in a row, or a failure while it returns.
        """
        self._num_failures += 1
        is_returning = self._open_until_at > 0 and now_at < self._returned_at
        return not self.is_open(now_at) and (self._num_failures >= self._config.failures or is_returning)

    def was_slow(self, is_slow: bool) -> bool:
        """Record whether the instance was slow in one interval.

        Returns:
            Whether the breaker should open: it was slow in `slow_intervals` intervals in a row.
        """
        self._num_slow = self._num_slow + 1 if is_slow else 0
        return self._num_slow >= self._config.slow_intervals

    def open(self, now_at: float) -> float:
        """Take the instance out.

        Returns:
            For how long, in seconds.
        """
        open_s = self._next_open_s
        self._next_open_s = min(2 * open_s, self._config.max_open_s)
        self._open_until_at = now_at + open_s
        self._return(self._open_until_at)
        return open_s

    def come_back(self, now_at: float) -> None:
        """Let the users of an instance that was down return gradually; forget its earlier failures."""
        self._open_until_at = 0.0
        self._return(now_at)

    def _return(self, from_at: float) -> None:
        self._num_failures = 0
        self._num_slow = 0
        self._returned_at = from_at + self._config.return_s

    def is_open(self, now_at: float) -> bool:
        """Whether the instance gets no requests at all."""
        return now_at < self._open_until_at

    def is_closed(self, now_at: float) -> bool:
        """Whether the instance gets all of its users: `share` is 1."""
        return now_at >= self._returned_at

    def share(self, now_at: float) -> float:
        """The share of its users that the instance gets: 0 while open, then growing linearly to 1."""
        if now_at < self._open_until_at:
            return 0.0
        if now_at >= self._returned_at:
            return 1.0
        done = 1 - (self._returned_at - now_at) / self._config.return_s
        return self._config.return_share + (1 - self._config.return_share) * done
