"""Who may enter: a bound on the requests being served at once, tighter for what matters less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from npu_gr.admission.gradient import GradientLimit
from npu_gr.errors import Overloaded


class Priority(Enum):
    """A kind of request, and the share of the limit that it may fill."""

    RANK = 1.0  # what the cascade waits for
    GENERATE = 0.9  # retrieval has other sources
    SIGNAL = 0.75  # an optimisation


class Limiter:
    """At most `limit` admitted at a time; the next is refused at once, never queued.

    Invariant: `inflight` equals the number of open `admit()` blocks.
    """

    def __init__(self, limit: int, adaptive: GradientLimit | None = None) -> None:
        """`limit` stays as it is; `adaptive` may bring it down."""
        self._most, self._adaptive = limit, adaptive
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
    def admit(self, priority: Priority = Priority.RANK) -> Iterator[None]:
        """Hold one of the slots.

        Raises:
            Overloaded: the priority's share of the limit is taken.
        """
        self.check(priority)
        self.inflight += 1
        try:
            yield
        finally:
            self.inflight -= 1

    def served(self, of_objective: float) -> None:
        """A request was answered, after so many times its objective; call it inside `admit`."""
        if self._adaptive is not None:
            self._adaptive.observe(of_objective, self.inflight)
