"""A worker that has not moved for longer than its limit is late, whatever it waits for."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from npu_gr.core.health import (
    COMPILE_S,
    DEAD_S,
    LEAST_S,
    TASK_S,
    UNKNOWN_S,
    Health,
    Worker,
    compiles,
    limit_s,
)
from npu_gr.core.lifetime import running, to_the_end
from tests.clock import Clock


def test_work_is_late_after_its_limit_and_well_again_at_its_end() -> None:
    clock, health = Clock(), Health()
    device = health.add("device_0", Worker(clock), is_vital=True)
    clock.now_at += 1e6
    assert health.why_not_ready() == "", "a worker that waits for work is never late"
    assert health.ages_s() == {"device_0": 0.0}
    with device.busy(2.0):
        clock.now_at += 2.0
        assert health.why_not_ready() == ""
        clock.now_at += 1.0
        assert health.why_not_ready() == "device_0 has not moved for 3.0 s, its limit is 2.0 s"
        assert health.ages_s() == {"device_0": 3.0}
        assert health.why_dead() == ""
        clock.now_at += DEAD_S
        assert health.why_dead() == health.why_not_ready() != ""
    assert health.why_not_ready() == health.why_dead() == ""
    assert health.late() == {"device_0": None}


def test_the_latest_of_several_works_counts() -> None:
    clock, health = Clock(), Health()
    calls = health.add("history_reads", Worker(clock))
    with calls.busy(10.0):
        clock.now_at += 1.0
        with calls.busy(0.5):
            clock.now_at += 1.0
            late = health.late()["history_reads"]
            assert late is not None
            assert (late.age_s, late.limit_s) == (1.0, 0.5)
        assert health.late() == {"history_reads": None}
        assert health.ages_s() == {"history_reads": 2.0}


def test_a_store_that_hangs_is_shown_and_does_not_stop_the_instance() -> None:
    clock, health = Clock(), Health()
    with health.add("history_writes", Worker(clock)).busy(1.0):
        clock.now_at += 1000.0
        assert health.late()["history_writes"] is not None
        assert health.why_not_ready() == health.why_dead() == ""


def test_a_limit_is_a_multiple_of_the_estimate_and_never_short() -> None:
    assert limit_s(0.001) == LEAST_S
    assert limit_s(5.0) == 50.0


def test_work_that_compiles_has_the_time_of_a_compiler() -> None:
    clock, health = Clock(), Health()
    device = health.add("device_0", Worker(clock), is_vital=True)
    with device.busy(LEAST_S):
        clock.now_at += 3.0
        assert health.why_not_ready()
        compiles()
        assert health.why_not_ready() == ""
        clock.now_at += UNKNOWN_S
        assert "its limit is 30.0 s" in health.why_not_ready()
        clock.now_at = COMPILE_S
        assert health.why_dead() == ""
        clock.now_at += 4.0
        assert health.why_dead()
    compiles()  # without a work
    with device.busy(LEAST_S):
        clock.now_at += 3.0
        assert health.why_not_ready(), "the next work is a usual one"


async def test_a_task_that_has_ended_with_an_error_stays_late() -> None:
    clock, health = Clock(), Health()
    worker = health.add("brownout", Worker(clock))
    turns = 0

    async def work() -> None:
        nonlocal turns
        async for _ in worker.turns(0.0):
            turns += 1
            if turns == 3:
                raise RuntimeError("planted")

    with suppress(RuntimeError):
        await work()
    assert turns == 3
    clock.now_at += TASK_S + 1.0
    assert health.late()["brownout"] is not None


async def test_a_task_that_waits_for_its_next_turn_is_not_late() -> None:
    clock, health = Clock(), Health()
    worker = health.add("brownout", Worker(clock))

    async def work() -> None:
        async for _ in worker.turns(60.0):
            pytest.fail("it waits")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    clock.now_at += 1e6
    assert health.late() == {"brownout": None}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_loop_ends_although_its_body_must_not_be_interrupted() -> None:
    """An instance stopped while it follows a delta would wait for ever."""
    began, may_end = asyncio.Event(), asyncio.Event()

    async def body() -> None:
        began.set()
        await may_end.wait()

    async def loop() -> None:
        async for _ in Worker().turns(0.001):
            await to_the_end(body())

    async with asyncio.timeout(10):
        async with running(loop()):
            await began.wait()
            asyncio.get_running_loop().call_later(0.01, may_end.set)
