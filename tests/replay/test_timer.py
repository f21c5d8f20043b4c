"""The sleeper wakes at its time, never before, and lets the loop turn when the time is over."""

from __future__ import annotations

import asyncio
import logging
import sys
import time

import pytest

from npu_gr.replay.player import Timer


@pytest.mark.parametrize("platform", ["linux", "other"])
async def test_it_wakes_at_its_time(
    platform: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if platform == "linux" and sys.platform != "linux":
        pytest.skip("timerfd is Linux's")
    monkeypatch.setattr("npu_gr.replay.player.sys.platform", platform)
    with caplog.at_level(logging.WARNING):
        async with Timer() as timer:
            for wait_s in (0.002, 0.0, 0.01):
                wake_at = time.monotonic() + wait_s
                await asyncio.wait_for(timer.until(wake_at), 5)
                # the loop's own clock may be a resolution step early, timerfd may not
                assert time.monotonic() >= wake_at - (0 if platform == "linux" else 0.002)
    assert sum("timerfd" in message for message in caplog.messages) == (platform != "linux")


async def test_a_time_that_is_over_still_lets_others_run() -> None:
    ran: list[int] = []
    async with Timer() as timer:
        asyncio.get_running_loop().call_soon(ran.append, 1)
        await timer.until(time.monotonic() - 1)
    assert ran == [1]


async def test_a_cancelled_sleep_does_not_wake_the_next_one() -> None:
    async with Timer() as timer:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await timer.until(time.monotonic() + 0.005)
        at_s = time.monotonic() + 0.03
        await timer.until(at_s)
        assert time.monotonic() >= at_s
