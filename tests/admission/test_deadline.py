"""A deadline cancels its block and nothing else, and costs nothing once the block has ended."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.admission import deadline as module
from npu_gr.admission.deadline import Deadline
from npu_gr.core.errors import DeadlineExceeded


async def test_the_block_is_cancelled_and_the_error_names_the_budget() -> None:
    unwound = False

    async def work() -> None:
        nonlocal unwound
        async with Deadline(0.02) as deadline_at:
            assert 0 < deadline_at - time.monotonic() <= 0.02
            try:
                await asyncio.sleep(10)
            finally:
                unwound = True

    with pytest.raises(DeadlineExceeded, match="20 ms"):
        await work()
    assert unwound
    await asyncio.sleep(0)  # the task goes on
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("budget_s", [0.0, -1.0])
async def test_no_budget_ends_at_the_first_wait(budget_s: float) -> None:
    with pytest.raises(DeadlineExceeded):
        async with Deadline(budget_s):
            await asyncio.sleep(10)


async def test_a_block_in_time_is_left_alone_and_its_error_passes() -> None:
    async with Deadline(10):
        await asyncio.sleep(0)
    with pytest.raises(KeyError):
        async with Deadline(10):
            raise KeyError
    async with Deadline(0.01):
        pass
    await asyncio.sleep(0.03)


@pytest.mark.parametrize(("outer_s", "inner_s"), [(10, 0.01), (0.01, 10)])
async def test_of_two_the_one_that_is_due_ends(outer_s: float, inner_s: float) -> None:
    ended = []
    try:
        async with Deadline(outer_s):
            try:
                async with Deadline(inner_s):
                    await asyncio.sleep(10)
            except DeadlineExceeded:
                ended.append("inner")
    except DeadlineExceeded:
        ended.append("outer")
    assert ended == ["inner" if inner_s < outer_s else "outer"]


async def test_who_cancels_the_task_gets_a_cancelled_task() -> None:
    async def work() -> None:
        async with Deadline(10):
            await asyncio.sleep(10)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_later_deadline_does_not_hold_up_an_earlier_one() -> None:
    async def late() -> None:
        async with Deadline(30):
            await asyncio.sleep(30)

    task = asyncio.create_task(late())
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        with pytest.raises(DeadlineExceeded):
            async with Deadline(0.01):
                await asyncio.sleep(20)
    task.cancel()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.001, 0.01, 5.0]), st.booleans()), max_size=40))
def test_each_ends_by_its_own_budget(requests: list[tuple[float, bool]]) -> None:
    async def one(budget_s: float, is_quick: bool) -> str:
        try:
            async with Deadline(budget_s):
                await asyncio.sleep(0 if is_quick or budget_s > 1 else 30)
        except DeadlineExceeded:
            return "late"
        return "done"

    async def all_of_them() -> list[str]:
        async with asyncio.timeout(10):
            return await asyncio.gather(*(one(*request) for request in requests))

    found = asyncio.run(all_of_them())
    for (budget_s, is_quick), end in zip(requests, found, strict=True):
        if budget_s > 1:
            assert end == "done"
        elif not is_quick:
            assert end == "late"


async def test_what_has_ended_is_forgotten() -> None:
    async def quick() -> None:
        async with Deadline(3600):
            pass

    for _ in range(5000):
        await quick()
    timer = module._timer_of(asyncio.get_running_loop())
    assert len(timer._heap) <= 2 * module._LEAST_SWEEP + 2


def test_a_loop_that_has_closed_is_forgotten_with_the_next() -> None:
    async def use() -> weakref.ref[asyncio.AbstractEventLoop]:
        async with Deadline(10):
            await asyncio.sleep(0)
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(use())
    asyncio.run(use())
    gc.collect()
    assert loop() is None
