"""Admit a request only if it will probably finish within its objective; otherwise reject it immediately with 429.

    forecast = wait for the device, by the queue's estimates + P98 of what requests lately took beyond that estimate

The second term is learnt. It holds the request's own pass, what the request waits for on its way, and the error of the
estimates. A request with little work before it is admitted whatever was learnt: a stall cannot shut the gate for good.

Source: admission by expected completion time, the usual form for a server that knows what its work costs. `gradient.py`
bounds the requests in flight where the cost is not known.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from npu_gr.core.errors import Overloaded

WINDOW = 128  # latencies that the gate remembers
LATEST = 3  # the 3rd largest of 128 latencies is our P98 estimate
GUESS = 0.3  # share of the objective that stands for the P98 until the window is full
AIM = 0.9  # share of the objective by which a request should be done: the rest is room for error
OPEN = 0.1  # share of the objective: a wait up to this keeps no request out


class Gate:
    """The latencies of one kind of request, and the decision that they lead to."""

    def __init__(self) -> None:
        self._latest_s = deque[float]()
        self._sorted_s = list[float]()

    def check(self, wait_s: float, objective_s: float) -> None:
        """Decide about one request.

        Raises:
            Overloaded: the request would probably miss its objective.
        """
        beyond_s = self._sorted_s[-LATEST] if len(self._latest_s) == WINDOW else GUESS * objective_s
        limit_s = max(AIM * objective_s - beyond_s, OPEN * objective_s)
        if wait_s > limit_s:
            raise Overloaded(f"it would wait {wait_s * 1e3:.0f} ms for the device, the limit is {limit_s * 1e3:.0f}")

    def learn(self, wait_s: float, took_s: float) -> None:
        """Record a request that ended: the wait that was forecast, and the time that it took in all."""
        beyond_s = took_s - wait_s
        self._latest_s.append(beyond_s)
        insort(self._sorted_s, beyond_s)
        if len(self._latest_s) > WINDOW:
            del self._sorted_s[bisect_left(self._sorted_s, self._latest_s.popleft())]
