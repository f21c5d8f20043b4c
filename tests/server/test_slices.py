"""Long slices of work come one after the other and leave the loop as much time.

Nobody waits longer than it may.
"""

from __future__ import annotations

import asyncio
import threading
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


async def test_work_in_a_thread_counts_as_the_loops_and_comes_one_after_the_other() -> None:
    clock = Clock()
    slices = clock.slices()
    running, most = 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.002)
        clock.work(BURST_S * SHARE)
        running -= 1

    before_s = clock.read()
    async with asyncio.timeout(10):
        await asyncio.gather(*(slices.in_thread(work) for _ in range(4)))
        await slices.turn()
    assert most == 1
    assert clock.read() - before_s == pytest.approx(4 * BURST_S - BURST_S)


async def test_who_leaves_a_thread_pays_for_it_and_the_next_waits() -> None:
    slices = CooperativeSlices()
    begun, go = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait(10)

    left = asyncio.create_task(slices.in_thread(work))
    await asyncio.to_thread(begun.wait, 10)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    with pytest.raises(DeadlineExceeded, match="waited for its body"):
        await slices.in_thread(lambda: None, time.monotonic() + 0.01)
    go.set()
    async with asyncio.timeout(10):
        assert await slices.in_thread(lambda: 1) == 1


async def test_an_error_of_a_thread_is_raised_and_its_time_paid() -> None:
    slices = CooperativeSlices()

    def fail() -> None:
        began_s = time.thread_time()
        while time.thread_time() - began_s < 0.05:
            pass
        raise ValueError("not a body")

    with pytest.raises(ValueError, match="not a body"):
        await slices.in_thread(fail)
    with pytest.raises(DeadlineExceeded, match="waited for its body"):
        await slices.turn(time.monotonic() + 0.001)
