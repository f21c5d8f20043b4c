"""Work has an answer at its deadline, also where its end waits for the device."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from npu_gr.core.errors import DeadlineExceeded, Unprocessable
from npu_gr.core.lifetime import deadline, within


class Device:
    """A pass that a cancelled waiter must wait for, as the scheduler does."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.steps: list[str] = []

    async def use(self) -> None:
        """Hold pages until the device has ended."""
        try:
            await self.ended.wait()
        except asyncio.CancelledError:
            while not self.ended.is_set():
                ended = asyncio.ensure_future(self.ended.wait())
                try:
                    await asyncio.wait({ended})
                except asyncio.CancelledError:
                    self.steps.append("cancelled again")
            raise
        finally:
            self.steps.append("pages released")


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_it_returns_and_raises_what_the_work_does() -> None:
    async def work(deadline_at: float) -> float:
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        return deadline_at

    async def fails(_: float) -> None:
        await asyncio.sleep(0)
        raise Unprocessable("of the work")

    before_at = time.monotonic()
    assert before_at + 9 < await within(10.0, work) < time.monotonic() + 11
    assert await within(float("inf"), work) == float("inf")
    with pytest.raises(Unprocessable, match="of the work"):
        await within(10.0, fails)


async def test_work_that_can_end_is_cancelled_and_has_ended() -> None:
    ended = False

    async def work(_: float) -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            ended = True

    with pytest.raises(DeadlineExceeded, match="not done within 10 ms"):
        await within(0.01, work)
    assert ended
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def direct(device: Device, _: float) -> None:
    await device.use()


async def in_a_group(device: Device, _: float) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(device.use())


async def with_a_deadline_of_its_own(device: Device, deadline_at: float) -> None:
    async with deadline(0.005):
        await device.use()


@pytest.mark.parametrize("work", [direct, in_a_group, with_a_deadline_of_its_own])
async def test_the_caller_does_not_wait_for_the_device_and_the_pages_do(
    work: Callable[[Device, float], Coroutine[Any, Any, None]],
) -> None:
    device = Device()
    with pytest.raises(DeadlineExceeded):
        await within(0.02, lambda deadline_at: work(device, deadline_at))
    await settled()
    assert "pages released" not in device.steps, "the device still uses them"
    gc.collect()  # nothing but the event loop and the work itself hold what goes on
    device.ended.set()
    await settled()
    assert device.steps[-1] == "pages released"


async def test_who_cancels_it_from_outside_waits_for_the_device() -> None:
    device = Device()
    task = asyncio.create_task(within(60.0, lambda at: direct(device, at)))
    await settled()
    task.cancel()
    await settled()
    assert not task.done()
    device.ended.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert device.steps == ["pages released"]


async def test_an_error_of_what_goes_on_is_not_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = Device()

    async def work(_: float) -> None:
        try:
            await device.use()
        except asyncio.CancelledError:
            raise Unprocessable("too late") from None

    with pytest.raises(DeadlineExceeded):
        await within(0.01, work)
    device.ended.set()
    await settled()
    gc.collect()
    assert not caplog.records
