"""Bound the requests in flight; kinds that matter less may fill a smaller share of the bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from npu_gr.admission.gate import Gate
from npu_gr.admission.gradient import GradientLimit
from npu_gr.core.errors import DeadlineExceeded, Overloaded
from npu_gr.core.kinds import Priority


class Expected(NamedTuple):
    """What a request is forecast to do."""

    objective_s: float
    wait_s: float  # seconds that it will wait for the device
    gate: Gate  # of its kind; it learns how the request ended


class Limiter:
    """Admit at most `limit` requests at a time; refuse the next at once, queue none.

    Invariant: `inflight` equals the number of open `admit()` blocks.
    """

    def __init__(
        self, limit: int, adaptive: GradientLimit | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Nothing is in flight yet.

        Args:
            limit: requests at once.
            adaptive: lowers that limit by latency; None = nothing does.
            clock: seconds that never go back.
        """
        self._most = limit
        self._adaptive = adaptive
        self._clock = clock
        self.inflight = 0

    def reconfigure(self, limit: int, adaptive: GradientLimit | None) -> None:
        """Apply other bounds from now on; admitted requests stay admitted."""
        self._most = limit
        self._adaptive = adaptive

    @property
    def limit(self) -> int:
        """The limit in force now."""
        return self._most if self._adaptive is None else min(self._most, self._adaptive.limit)

    def check(self, priority: Priority = Priority.RANK) -> None:
        """Refuse early what `admit` would refuse for want of a slot; cheap, so it can come before a body is read.

        Raises:
            Overloaded: the priority's share of the limit is taken.
        """
        limit = self.limit
        if self.inflight >= max(1, int(limit * priority.value)):
            raise Overloaded(f"{self.inflight} requests in flight, the limit is {limit}")

    @contextmanager
    def admit(self, priority: Priority = Priority.RANK, expected: Expected | None = None) -> Iterator[None]:
        """Hold a slot while the block runs; the adaptive limit and the gate learn from how the block ends.

        Args:
            priority: its share of the limit bounds the request.
            expected: the forecast; None = nothing is learnt from the block.

        Raises:
            Overloaded: the priority's share of the limit is taken, or the request would probably miss its objective.
        """
        self.check(priority)
        if expected is not None and self._adaptive is not None:
            expected.gate.check(expected.wait_s, expected.objective_s)
        self.inflight += 1
        began_at = self._clock()
        try:
            yield
            self._learn(expected, self._clock() - began_at)
        except DeadlineExceeded:
            # the request would have taken longer than its budget; that teaches something only if the budget was
            # at least the objective
            if expected is not None and self._clock() - began_at >= expected.objective_s:
                self._learn(expected, self._clock() - began_at)
            raise
        except Overloaded:
            if self._adaptive is not None and expected is not None:  # the gate learns nothing: no work was done
                self._adaptive.observe(REFUSED, self.inflight)
            raise
        finally:
            self.inflight -= 1

    def _learn(self, expected: Expected | None, took_s: float) -> None:
        if self._adaptive is not None and expected is not None:
            self._adaptive.observe(took_s / expected.objective_s, self.inflight)
            expected.gate.learn(expected.wait_s, took_s)


REFUSED = 2.0  # when the device queue rejects an admitted request, feed the limit a latency of 2 x the objective
