"""A slot and a deadline are given back however the block ends."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from npu_gr.admission.deadline import deadline
from npu_gr.admission.gate import Gate
from npu_gr.admission.gradient import GradientLimit
from npu_gr.admission.limiter import Expected, Limiter
from npu_gr.core.errors import DeadlineExceeded, Overloaded
from npu_gr.core.kinds import Priority


def test_the_limit_holds_and_slots_come_back() -> None:
    limiter = Limiter(2)
    with limiter.admit(), limiter.admit():
        with pytest.raises(Overloaded, match="limit is 2"), limiter.admit():
            pass
        assert limiter.inflight == 2
    with pytest.raises(ZeroDivisionError), limiter.admit():
        _ = 1 / 0
    assert limiter.inflight == 0


def test_what_matters_less_stops_earlier() -> None:
    limiter = Limiter(8)
    with ExitStack() as held:
        for _ in range(6):
            held.enter_context(limiter.admit(Priority.SIGNAL))
        with pytest.raises(Overloaded):
            limiter.check(Priority.SIGNAL)
        held.enter_context(limiter.admit(Priority.GENERATE))
        with pytest.raises(Overloaded):
            limiter.check(Priority.GENERATE)
        held.enter_context(limiter.admit(Priority.RANK))
        with pytest.raises(Overloaded, match="8 requests in flight, the limit is 8"):
            limiter.check()
    assert limiter.inflight == 0


def test_the_adaptive_limit_is_in_force() -> None:
    now_at = 0.0
    limiter = Limiter(100, GradientLimit(2, 100, window=1), lambda: now_at)
    with ExitStack() as held:
        for _ in range(2):
            held.enter_context(limiter.admit())
        for _ in range(200):
            with limiter.admit(expected=Expected(0.1, 0.0, Gate())):
                now_at += 0.9
        assert limiter.limit == 4  # where half of it is its root
        for _ in range(2):
            held.enter_context(limiter.admit())
        with pytest.raises(Overloaded, match="the limit is 4"):
            limiter.check()


@pytest.mark.parametrize(
    ("error", "after_s", "objective_s", "falls"),
    [
        (DeadlineExceeded("late"), 0.2, 0.1, True),
        (DeadlineExceeded("its caller gave it less than the objective"), 0.05, 0.1, False),
        (Overloaded("the device's queue is full"), 0.0, 0.1, True),
        (DeadlineExceeded("nothing is expected of it"), 9.0, None, False),
        (ZeroDivisionError("its own fault"), 9.0, 0.1, False),
    ],
)
def test_a_late_or_refused_request_brings_the_limit_down(
    error: Exception, after_s: float, objective_s: float | None, falls: bool
) -> None:
    now_at = 0.0
    limiter = Limiter(100, GradientLimit(2, 100, window=4), lambda: now_at)
    expected = None if objective_s is None else Expected(objective_s, 0.0, Gate())

    def request() -> None:
        nonlocal now_at
        with limiter.admit(expected=expected):
            now_at += after_s
            raise error

    for _ in range(4):
        with pytest.raises(type(error)):
            request()
    assert (limiter.limit < 100) is falls
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
