"""The loop's lag is what a caller at any instant waits: a standstill of 1 s shows as 1 s."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import pytest
import uvloop

from npu_gr.server.loop_lag import FREEZE_S, PERIOD_S, latenesses, probe_loop_lag


def test_a_standstill_counts_for_every_timer_that_was_due_in_it() -> None:
    late_s = latenesses(due_at=100.0, now_at=101.0)
    assert len(late_s) == 1.0 / PERIOD_S + 1
    assert late_s[0] == 1.0
    assert late_s[-1] == pytest.approx(0.0, abs=1e-9)
    assert sum(late_s) / len(late_s) == pytest.approx(0.5)  # of instants in it, on the average
    assert latenesses(100.0, 100.0) == [0.0]
    assert latenesses(100.0, 99.999) == [0.0]  # a timer that fires early is not late
    assert latenesses(100.0, 100.004) == [pytest.approx(0.004)]
    assert len(latenesses(0.0, 1e6)) == 2400  # after a day asleep the probe itself must not block


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_planted_freeze_is_seen(
    new_loop: Callable[[], asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[float] = []
    freezes: list[int] = []
    periods: list[int] = []

    async def work() -> None:
        async with probe_loop_lag(
            seen.append, lambda: freezes.append(len(seen)), lambda: periods.append(1)
        ):
            await asyncio.sleep(4 * PERIOD_S)
            assert periods
            before = len(freezes)
            time.sleep(2 * FREEZE_S)  # noqa: ASYNC251  (the fault)
            await asyncio.sleep(4 * PERIOD_S)
            assert len(freezes) > before
        ended = len(seen)
        await asyncio.sleep(4 * PERIOD_S)
        assert len(seen) == ended  # nothing after the block

    with (
        caplog.at_level(logging.WARNING, "npu_gr.server.loop_lag"),
        asyncio.Runner(loop_factory=new_loop) as runner,
    ):
        runner.run(work())
    assert max(seen) >= 2 * FREEZE_S - PERIOD_S
    assert sum(each > FREEZE_S for each in seen) >= FREEZE_S / PERIOD_S - 2
    assert "the event loop stood still for" in caplog.text


def test_a_freeze_within_the_measurement_is_seen() -> None:
    freezes: list[int] = []
    stalls_s = iter([2 * FREEZE_S])

    async def work() -> None:
        # a process is stopped anywhere, also between two lines of the probe
        async with probe_loop_lag(
            lambda _: None, lambda: freezes.append(1), lambda: time.sleep(next(stalls_s, 0.0))
        ):
            await asyncio.sleep(3 * FREEZE_S)

    asyncio.run(work())
    assert freezes == [1]
