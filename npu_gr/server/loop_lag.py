"""How late the event loop is: a timer that is due all the time, and how long after its instant it fires.

A request arrives at any instant, so every instant counts alike: after the loop stood still for a
second, the timers that were due meanwhile count too, each with its own lateness. A timer that was
set again only after the standstill would show one late firing among hundreds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

log = logging.getLogger(__name__)

PERIOD_S = 0.025
FREEZE_S = 0.25  # a loop that is later has stood still
_MOST_MISSED = 2400  # timers counted of one standstill: a minute


def latenesses(due_at: float, now_at: float, period_s: float = PERIOD_S) -> list[float]:
    """How late each timer is that was due from `due_at` on, every `period_s`, until now.

    The first is the latest.

    Args:
        due_at: instant of the first timer.
        now_at: when the loop came to it.
        period_s: between two timers.
    """
    late_s = max(0.0, now_at - due_at)
    num = min(int(late_s / period_s) + 1, _MOST_MISSED)
    return [late_s - index * period_s for index in range(num)]


@asynccontextmanager
async def probe_loop_lag(
    observe: Callable[[float], None],
    on_freeze: Callable[[], None],
    every_period: Callable[[], None] = lambda: None,
) -> AsyncIterator[None]:
    """Measure the running loop while the block runs.

    Args:
        observe: called with the lateness of each timer, in seconds.
        on_freeze: called once after each standstill of over `FREEZE_S`; it is logged, too.
        every_period: called after each measurement, for work of microseconds.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle
    # our own clock: that of uvloop is read once a turn, in milliseconds
    due_at = time.monotonic() + PERIOD_S

    def fire() -> None:
        nonlocal due_at, timer
        now_at = time.monotonic()
        late_s = latenesses(due_at, now_at)
        due_at = now_at + PERIOD_S  # from here on: a standstill within this function counts, too
        for each_s in late_s:
            observe(each_s)
        if late_s[0] > FREEZE_S:
            on_freeze()
            log.warning("the event loop stood still for %.2f s", late_s[0])
        every_period()
        timer = loop.call_later(PERIOD_S, fire)

    timer = loop.call_later(PERIOD_S, fire)
    try:
        yield
    finally:
        timer.cancel()
