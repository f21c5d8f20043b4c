"""Long slices of work come one after the other and leave the loop as much time.

Nobody waits longer than it may.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from npu_gr.core.errors import DeadlineExceeded
from npu_gr.server.kind_routes import BURST_S, SHARE, CooperativeSlices


class Clock:
    """Only work and sleeps move it."""

    def __init__(self) -> None:
        self.now_at = 1000.0

    def read(self) -> float:
        return self.now_at

    async def sleep(self, seconds: float) -> None:
        self.now_at += seconds
        await asyncio.sleep(0)

    def slices(self) -> CooperativeSlices:
        return CooperativeSlices(self.read, self.read, self.sleep)

    def work(self, seconds: float) -> None:
        self.now_at += seconds


async def test_pieces_take_half_of_the_time_in_the_long_run() -> None:
    clock = Clock()
    slices = clock.slices()
    began_at = clock.now_at
    for _ in range(50):
        await slices.turn()
        with slices:
            clock.work(0.02)
    took_s = clock.now_at - began_at
    assert took_s == pytest.approx(50 * 0.02 / SHARE - 0.02 - BURST_S)


async def test_short_pieces_among_other_work_never_wait() -> None:
    clock = Clock()
    slices = clock.slices()
    for _ in range(1000):
        before_at = clock.now_at
        await slices.turn()
        assert clock.now_at == before_at
        with slices:
            clock.work(0.0007)
        clock.work(0.0007)  # what else a request costs


async def test_they_come_first_come_first_served() -> None:
    clock = Clock()
    slices = clock.slices()
    order: list[int] = []

    async def piece(number: int) -> None:
        await slices.turn()
        with slices:
            clock.work(0.02)
        order.append(number)

    async with asyncio.timeout(10):
        await asyncio.gather(*(piece(number) for number in range(20)))
    assert order == list(range(20))


async def test_whoever_has_no_time_is_told_and_whoever_leaves_is_forgotten() -> None:
    slices = CooperativeSlices()
    await slices.turn()
    with slices:
        began_s = time.thread_time()
        while time.thread_time() - began_s < 0.05:
            pass
    waiting = asyncio.create_task(slices.turn())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(DeadlineExceeded, match="waited for its body"):
        await slices.turn(time.monotonic() + 0.001)
    async with asyncio.timeout(10):
        await slices.turn(time.monotonic() + 5.0)
