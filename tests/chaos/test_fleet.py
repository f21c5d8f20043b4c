"""Faults behind a router: all instances die and come back together, and one stands still.

The short form has light instances, the long one three `npu-gr serve`.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from pathlib import Path

from tests.chaos.rig import LONG, Scale, each_scale
from tests.route.chaos import Fleet, Load, Sample, Window, fleet

NAMES = ("a", "b", "c")
PAIRS_PER_S = 20.0
QUARTER = 0.25  # of a rank's budget: the most that one instance which stands still may cost


async def back(f: Fleet) -> float:
    """Wait until the router sees all of them up. Returns the instant."""
    await f.until(lambda states: sum(state == "UP" for state in states.values()) == len(NAMES))
    return time.monotonic()


@each_scale
async def test_signals_are_taken_as_soon_as_all_are_back(scale: Scale, tmp_path: Path) -> None:
    """A slow start is relative to the others: if all are new, all take their users."""
    async with fleet(Path(tempfile.mkdtemp(dir=tmp_path)), *NAMES, is_light=scale is not LONG) as f:
        load = Load(f.port, PAIRS_PER_S, f.times)
        async with load.running():
            await asyncio.sleep(scale.load_s / 2)
            for name in NAMES:
                f.instances[name].signal(signal.SIGKILL)
                await f.instances[name].ended()
            await f.until(lambda states: all(state == "DOWN" for state in states.values()))
            for name in NAMES:
                f.launch(name)
            back_at = await back(f)
            await asyncio.sleep(scale.load_s + 1.0)
            after = due(load, back_at, await settled(load))
        rejected = [sample for sample in after if sample.status not in (200, 202)]
        assert len(after) > PAIRS_PER_S
        if scale is LONG:
            assert len(rejected) <= scale.most_failed * len(after), rejected[:3]
        else:
            assert {sample.status for sample in rejected} <= {429}, rejected[:3]


@each_scale
async def test_an_instance_that_stands_still_costs_a_rank_a_quarter_of_its_budget(
    scale: Scale, tmp_path: Path
) -> None:
    async with fleet(Path(tempfile.mkdtemp(dir=tmp_path)), *NAMES, is_light=scale is not LONG) as f:
        load = Load(f.port, PAIRS_PER_S, f.times)
        async with load.running():
            await asyncio.sleep(scale.load_s)
            froze_at = time.monotonic()
            f.instances["b"].signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(scale.load_s)
                thawed_at = time.monotonic()
            finally:
                f.instances["b"].signal(signal.SIGCONT)
            await settled(load)
        quiet_s = sorted(s.took_s for s in ranks(load, 0.0, froze_at))
        hurt = ranks(load, froze_at, thawed_at)
        failed = [sample for sample in hurt if sample.status != 200]
        if scale is not LONG:
            assert hurt
            assert {sample.status for sample in failed} <= {429}, failed[:3]
            return
        assert len(failed) <= scale.most_failed * len(hurt), failed[:3]
        took_s = sorted(sample.took_s for sample in hurt)
        allowed_s = QUARTER * f.times.budget_s + 3 * quiet_s[int(0.95 * len(quiet_s))] + 0.05
        assert took_s[int(0.95 * len(took_s))] <= allowed_s


async def settled(load: Load) -> float:
    """Wait for the answers of all that was sent. Returns the instant up to which that is."""
    until_at = time.monotonic()
    await load.window(0.0, until_at)
    return until_at


def due(load: Load, from_at: float, to_at: float) -> list[Sample]:
    return [
        sample
        for sample in Window(load, from_at, to_at).samples
        if from_at <= sample.due_at < to_at
    ]


def ranks(load: Load, from_at: float, to_at: float) -> list[Sample]:
    return [sample for sample in due(load, from_at, to_at) if sample.kind == "rank"]
