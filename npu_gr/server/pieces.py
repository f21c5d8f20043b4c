"""Pieces of work on the event loop that take milliseconds: in turn, and for half of the time at most.

Decoding a long body is such a piece. Nothing can interrupt it, so others wait for one piece; they never wait for two,
however many callers send long bodies at once. Short pieces do not wait at all until `BURST_S` of them have come in a
row.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from npu_gr.core.errors import DeadlineExceeded

SHARE = 0.5  # of the loop's time
BURST_S = 0.01


class Pieces:
    """`await pieces.turn(...)`, then `with pieces:` around the piece, without waiting for anything in between."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Nothing was done yet.

        Args:
            clock: seconds that never go back.
            worked: seconds that this thread has worked; a core that others use is not the caller's doing.
            sleep: by that clock.
        """
        self._clock = clock
        self._worked = worked
        self._sleep = sleep
        self._lock = asyncio.Lock()  # first come, first served
        self._paid_at = float("-inf")  # when what the pieces took is made up for
        self._began_s = 0.0

    async def turn(self, until_at: float = float("inf")) -> None:
        """Wait for the turn; cancelled waiters leave nothing behind.

        Args:
            until_at: instant of the clock.

        Raises:
            DeadlineExceeded: the turn did not come until then.
        """
        if not self._lock.locked() and self._wait_s() <= 0:
            return
        left_s = until_at - self._clock()
        try:
            async with asyncio.timeout(left_s if left_s < float("inf") else None), self._lock:
                while (wait_s := self._wait_s()) > 0:
                    await self._sleep(wait_s)
        except TimeoutError:
            raise DeadlineExceeded("the time budget ran out while longer bodies were read") from None

    def _wait_s(self) -> float:
        return self._paid_at - BURST_S - self._clock()

    def __enter__(self) -> None:
        self._began_s = self._worked()

    def __exit__(self, *_: object) -> None:
        took_s = self._worked() - self._began_s
        self._paid_at = max(self._paid_at, self._clock() - took_s) + took_s / SHARE
