"""A slot and a deadline are given back however the block ends."""

from __future__ import annotations

import asyncio

import pytest

from npu_gr.admission.deadline import deadline
from npu_gr.admission.limiter import Limiter
from npu_gr.errors import DeadlineExceeded, Overloaded


def test_the_limit_holds_and_slots_come_back() -> None:
    limiter = Limiter(2)
    with limiter.admit(), limiter.admit():
        with pytest.raises(Overloaded, match="limit is 2"), limiter.admit():
            pass
        assert limiter.inflight == 2
    with pytest.raises(ZeroDivisionError), limiter.admit():
        _ = 1 / 0
    assert limiter.inflight == 0


async def test_a_cancelled_request_gives_its_slot_back() -> None:
    limiter = Limiter(1)

    async def request() -> None:
        with limiter.admit():
            await asyncio.Event().wait()

    task = asyncio.create_task(request())
    await asyncio.sleep(0)
    assert limiter.inflight == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert limiter.inflight == 0


async def never(unwound: list[str]) -> None:
    async with deadline(0.01):
        try:
            await asyncio.Event().wait()
        finally:
            unwound.append("yes")


async def test_the_deadline_unwinds_the_block() -> None:
    unwound: list[str] = []
    with pytest.raises(DeadlineExceeded, match="10 ms"):
        await never(unwound)
    assert unwound == ["yes"]


async def test_another_timeout_inside_is_not_ours() -> None:
    async with deadline(60):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0)
