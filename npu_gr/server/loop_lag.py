"""Measures how late the event loop is, with a periodic timer.

Requests arrive at any instant, so the measure must weigh all instants alike: after a standstill of
a second, every timer that was due meanwhile counts with its own lateness. Otherwise a standstill
would be one late timer among hundreds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

log = logging.getLogger(__name__)

PERIOD_S = 0.025
FREEZE_S = 0.25  # a longer delay counts as a standstill
_MOST_MISSED = 2400  # timers counted per standstill, i.e. its last minute


def latenesses(due_at: float, now_at: float, period_s: float = PERIOD_S) -> list[float]:
    """List the delays in seconds of the timers due at `due_at`, `due_at + period_s`, ... up to now.

    The first one is the longest.
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
        observe: Receives the delay of each timer, in seconds.
        on_freeze: Callback after each standstill longer than `FREEZE_S`, which is also logged.
        every_period: Callback after each measurement; it may take microseconds only.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle
    # not the loop's clock: uvloop reads it once per turn, in milliseconds
    due_at = time.monotonic() + PERIOD_S

    def fire() -> None:
        nonlocal due_at, timer
        now_at = time.monotonic()
        late_s = latenesses(due_at, now_at)
        # counted from here, so a standstill within this function counts too
        due_at = now_at + PERIOD_S
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
