"""Who may enter: a bound on the requests being served at once, tighter for what matters less."""

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
    """What is expected of a request when it comes."""

    objective_s: float
    wait_s: float  # for the device
    gate: Gate  # of its kind


class Limiter:
    """At most `limit` admitted at a time; the next is refused at once, never queued.

    Invariant: `inflight` equals the number of open `admit()` blocks.
    """

    def __init__(
        self, limit: int, adaptive: GradientLimit | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`limit` stays as it is; `adaptive` may bring it down."""
        self._most, self._adaptive, self._clock = limit, adaptive, clock
        self.inflight = 0

    def become(self, limit: int, adaptive: GradientLimit | None) -> None:
        """Other bounds from now on; who is in stays in."""
        self._most, self._adaptive = limit, adaptive

    @property
    def limit(self) -> int:
        """In force now."""
        return self._most if self._adaptive is None else min(self._most, self._adaptive.limit)

    def check(self, priority: Priority = Priority.RANK) -> None:
        """Refuse early what `admit` would refuse; costs nothing, so it can come before a body is read.

        Raises:
            Overloaded: the priority's share of the limit is taken.
        """
        limit = self.limit
        if self.inflight >= max(1, int(limit * priority.value)):
            raise Overloaded(f"{self.inflight} requests in flight, the limit is {limit}")

    @contextmanager
    def admit(self, priority: Priority = Priority.RANK, expected: Expected | None = None) -> Iterator[None]:
        """Hold one of the slots; the adaptive limit and the gate learn from how the block ends.

        Args:
            priority: whose share it may fill.
            expected: of the block; None = nothing is learnt from it.

        Raises:
            Overloaded: the priority's share of the limit is taken, or it would hardly be done in time.
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
            # it would have taken longer than this, which says nothing of one that had less time than the objective
            if expected is not None and self._clock() - began_at >= expected.objective_s:
                self._learn(expected, self._clock() - began_at)
            raise
        except Overloaded:
            if self._adaptive is not None and expected is not None:  # the gate learns nothing: it took no time
                self._adaptive.observe(REFUSED, self.inflight)
            raise
        finally:
            self.inflight -= 1

    def _learn(self, expected: Expected | None, took_s: float) -> None:
        if self._adaptive is not None and expected is not None:
            self._adaptive.observe(took_s / expected.objective_s, self.inflight)
            expected.gate.learn(expected.wait_s, took_s)


REFUSED = 2.0  # objectives that a request counts for which a full queue further in has refused
