"""When and how often a request is sent a second time: the budget of second tries, and the wait before a hedge.

A hedge is a second try beside the first: it goes out when the first answer is late, and the first that answers wins.
Late is a share of the request's time, or far over what requests of this kind took lately, whichever is earlier.

Source: The Tail at Scale (Dean and Barroso, CACM 2013), hedged requests. The bound on all second tries together and
the reserve for failures are ours.
"""

from __future__ import annotations

from collections import deque

from npu_gr.router.config import RetryConfig

_WINDOW = 256  # answers that say what is usual
_EVERY = 64  # answers between two looks at them
_QUANTILE = 0.99
_MAX_PATHS = 16  # the table of kinds has fewer; what has none of their paths is not hedged


class RetryBudget:
    """Limits second tries to a ratio of the ranks: they must not double the load of a fleet that fails."""

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._tokens = config.burst

    def earn(self) -> None:
        """Count one rank that is over; each adds `retry.ratio` of a second try."""
        self._tokens = min(self._config.burst, self._tokens + self._config.ratio)

    def take(self, is_hedge: bool) -> bool:
        """Take one second try. False: there is none left; a hedge leaves the last half to requests that failed."""
        if self._tokens < 1 or (is_hedge and self._tokens - 1 < self._config.burst / 2):
            return False
        self._tokens -= 1
        return True

    def give_back(self) -> None:
        """Return a second try that was taken and not used."""
        self._tokens += 1


class AnswerTimes:
    """When an answer is late, by the path of its request."""

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._took_s: dict[bytes, deque[float]] = {}
        self._late_s: dict[bytes, float] = {}  # `hedge_factor` times what 99 in 100 answers took
        self._num_answers = 0

    def answered(self, path: bytes, took_s: float) -> None:
        """Record what a good answer took from sending to its head."""
        took = self._took_s.get(path)
        if took is None:
            if len(self._took_s) >= _MAX_PATHS:
                return
            took = self._took_s[path] = deque(maxlen=_WINDOW)
        took.append(took_s)
        self._num_answers += 1
        if self._num_answers % _EVERY == 0:
            for known, times_s in self._took_s.items():
                if len(times_s) >= _EVERY:
                    usual_s = sorted(times_s)[int(_QUANTILE * len(times_s))]
                    self._late_s[known] = max(self._config.hedge_min_s, self._config.hedge_factor * usual_s)

    def after_s(self, path: bytes, left_s: float) -> float:
        """Seconds after which an answer is late, of a request that has `left_s` until its deadline."""
        return min(self._config.hedge_ratio * left_s, self._late_s.get(path, left_s))
