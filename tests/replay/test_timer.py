"""A sleep ends at its time, never before, and lets the loop turn when the time is over."""

from __future__ import annotations

import asyncio
import time

import pytest

from npu_gr.replay.player import sleep_until


async def test_it_wakes_at_its_time() -> None:
    for wait_s in (0.002, 0.0, 0.03):
        wake_at = time.monotonic() + wait_s
        await asyncio.wait_for(sleep_until(wake_at), 5)
        assert time.monotonic() >= wake_at


async def test_a_time_that_is_over_still_lets_others_run() -> None:
    ran: list[int] = []
    asyncio.get_running_loop().call_soon(ran.append, 1)
    await sleep_until(time.monotonic() - 1)
    assert ran == [1]


async def test_a_cancelled_sleep_does_not_wake_the_next_one() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await sleep_until(time.monotonic() + 0.005)
    at_s = time.monotonic() + 0.03
    await sleep_until(at_s)
    assert time.monotonic() >= at_s
