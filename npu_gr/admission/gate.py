"""Who is let in is likely to be done within its objective; who is not likely to be is told so at once.

    forecast = wait for the device, by the queue's estimates + what 98 of 100 lately took beyond theirs

The second part is learnt: it holds a request's own passes, what it waits for on the way, and what estimates lack. A
request that finds little before it is let in whatever was learnt, so a stall does not shut the gate for good.

Source: admission by expected completion, the usual form for a server that knows what its work costs; `gradient.py`
bounds what is in flight where it does not.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from npu_gr.core.errors import Overloaded

WINDOW, LATEST = 128, 3  # requests looked back at; the so many-th longest of them counts: 98 of 100 took less
GUESS = 0.3  # of the objective, as long as there are fewer
AIM = 0.9  # of the objective: to be done by
OPEN = 0.1  # of the objective: so much waiting before it keeps nobody out


class Gate:
    """Of one kind of request."""

    def __init__(self) -> None:
        self._latest_s, self._sorted_s = deque[float](), list[float]()

    def check(self, wait_s: float, objective_s: float) -> None:
        """Let a request in, or not.

        Raises:
            Overloaded: it would hardly be done in time.
        """
        beyond_s = self._sorted_s[-LATEST] if len(self._latest_s) == WINDOW else GUESS * objective_s
        limit_s = max(AIM * objective_s - beyond_s, OPEN * objective_s)
        if wait_s > limit_s:
            raise Overloaded(f"it would wait {wait_s * 1e3:.0f} ms for the device, the limit is {limit_s * 1e3:.0f}")

    def learn(self, wait_s: float, took_s: float) -> None:
        """One ended: what it was expected to wait, and what it took in all."""
        beyond_s = took_s - wait_s
        self._latest_s.append(beyond_s)
        insort(self._sorted_s, beyond_s)
        if len(self._latest_s) > WINDOW:
            del self._sorted_s[bisect_left(self._sorted_s, self._latest_s.popleft())]
