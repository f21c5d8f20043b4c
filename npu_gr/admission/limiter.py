"""Who may enter: a bound on the requests being served at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from npu_gr.errors import Overloaded


class Limiter:
    """At most `limit` admitted at a time; the next is refused at once, never queued.

    Invariant: `inflight` equals the number of open `admit()` blocks.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.inflight = 0

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold one of the slots.

        Raises:
            Overloaded: all are taken.
        """
        if self.inflight >= self.limit:
            raise Overloaded(f"{self.inflight} requests in flight, the limit is {self.limit}")
        self.inflight += 1
        try:
            yield
        finally:
            self.inflight -= 1
