"""Virtual time."""

import asyncio
import time

import pytest

from npu_gr.simulate.clock import Stalled, run


def test_sleeps_take_no_time_and_end_in_their_order() -> None:
    async def work() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), list[tuple[str, float]]()

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, loop.time()))

        await asyncio.gather(
            sleeper("day", 86_400.0), sleeper("second", 1.0), sleeper("again", 1.0)
        )
        return seen

    began_at = time.monotonic()
    assert run(work()) == [("second", 1.0), ("again", 1.0), ("day", 86_400.0)]
    assert time.monotonic() - began_at < 3600.0  # not a day


def test_timeouts_are_virtual() -> None:
    async def work() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0):
                await asyncio.sleep(31.0)
        return asyncio.get_running_loop().time()

    assert run(work()) == pytest.approx(30.0)


def test_a_deadlock_is_an_error_and_no_hang() -> None:
    async def work() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stalled):
        run(work())
