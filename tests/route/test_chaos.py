"""Whatever happens to an instance or router file, each rank is answered, no signal is sent twice.

They die, stop, slow down, join, roll, and HAProxy reloads; the fleet is whole again by itself, and
the users of the others notice nothing. The short run has light instances; the long one (-m chaos)
has three `npu-gr serve` and prints its figures (-s).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from npu_gr.route.process import TEACHES_S
from tests.route.chaos import LIGHT, RETURN_S, USERS, Fleet, Load, fleet

NAMES = ("a", "b", "c")
_STEADY_S = 60.0


class Run:
    """A fleet under load, and the checks after each fault."""

    def __init__(self, f: Fleet, load: Load, settle_s: float) -> None:
        self.fleet = f
        self.load = load
        self._settle_s = settle_s
        self.names: tuple[str, ...] = NAMES
        # user -> the instance that had their signals while all was well
        self.homes: dict[str, str] = {}

    async def steady(self, what: str) -> None:
        """Wait until, for a while, nearly all ranks are hits."""
        async with asyncio.timeout(_STEADY_S):
            # the users of an instance that is back come back over this time
            await asyncio.sleep(RETURN_S)
            while True:
                from_at = time.monotonic()
                await asyncio.sleep(self._settle_s)
                window = await self.load.window(from_at, time.monotonic())
                print(window.line(what))  # noqa: T201  (the figures, with -s)
                if window.hit_ratio(set(USERS)) > 0.97 and not window.errors:
                    break
        self.homes |= {s.user: s.instance for s in window.samples if s.kind == "signal"}

    async def fault(
        self, what: str, victim: str | None, since_at: float, signals_may_fail: bool
    ) -> None:
        """Check after a fault that no rank has failed, and that only the victim's users noticed."""
        took_s = await self.fleet.whole(len(self.names))
        window = await self.load.window(since_at, time.monotonic())
        theirs = {user for user, home in self.homes.items() if home == victim}
        print(window.line(f"{what} (whole after {took_s:.1f} s)"))  # noqa: T201
        failed = [sample for sample in window.errors if sample.kind == "rank"]
        assert not failed, failed[:3]
        lost = [sample for sample in window.errors if sample.kind == "signal"]
        assert signals_may_fail or not lost, lost[:3]
        assert {sample.user for sample in lost} <= theirs
        others = set(USERS) - theirs
        assert window.hit_ratio(others) > 0.97
        moved = [
            s
            for s in window.of(others & set(self.homes))
            if s.instance not in ("", self.homes[s.user])
        ]
        assert len(moved) <= 0.03 * len(window.samples), moved[:3]


async def crash(run: Run) -> None:
    victim = run.fleet.instances["a"]
    since_at = time.monotonic()
    victim.signal(signal.SIGKILL)
    await victim.ended()
    await run.fleet.until(lambda states: states.get("a") == "DOWN")
    run.fleet.launch("a")
    await run.fault("kill -9, start again", "a", since_at, signals_may_fail=True)


async def freeze(run: Run) -> None:
    since_at = time.monotonic()
    run.fleet.instances["b"].signal(signal.SIGSTOP)
    await run.fleet.until(lambda states: states.get("b") == "DOWN")
    run.fleet.instances["b"].signal(signal.SIGCONT)
    await run.fault("SIGSTOP until it is down", "b", since_at, signals_may_fail=True)


async def grow(run: Run) -> None:
    since_at = time.monotonic()
    run.fleet.launch("d")
    run.names = (*run.names, "d")
    run.fleet.announce(*run.names)
    took_s = await run.fleet.whole(len(run.names))
    window = await run.load.window(since_at, time.monotonic() + 0.5)
    print(window.line(f"one more joins (after {took_s:.1f} s)"))  # noqa: T201
    assert not window.errors
    moved = {s.instance for s in window.samples if s.instance != run.homes.get(s.user, s.instance)}
    assert moved <= {"d"}
    assert window.hit_ratio(set(USERS)) > 0.97  # a rank follows its signal over the join


async def reload(run: Run) -> None:
    """Let HAProxy reload three times, as when something in its file changes."""
    since_at = time.monotonic()
    for i in range(3):
        before = run.fleet.num_reloads()
        run.fleet.configure(threads=1 + i % 2, limits={"instance_queue": 65 + i})
        run.fleet.router.signal(signal.SIGHUP)
        async with asyncio.timeout(20):
            while run.fleet.num_reloads() == before:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    await run.fault("HAProxy reloads 3 times", None, since_at, signals_may_fail=False)


async def roll(run: Run) -> None:
    for name in run.names:
        since_at = time.monotonic()
        run.fleet.instances[name].signal(signal.SIGTERM)
        assert await run.fleet.instances[name].ended() == 0
        run.fleet.launch(name, "new")
        await run.fault(f"new model on {name}", name, since_at, signals_may_fail=True)
        await run.steady("and on")
    versions = {sample.version for sample in run.load.samples[-50:] if sample.kind == "rank"}
    assert len(versions) == 1
    assert versions != {run.load.samples[50].version}


async def go(
    folder: Path,
    faults: list[Callable[[Run], Awaitable[None]]],
    is_light: bool,
    per_s: float,
    settle_s: float,
) -> None:
    async with fleet(folder, *NAMES, is_light=is_light) as f:
        load = Load(f.port, per_s, f.times)
        async with load.running():
            run = Run(f, load, settle_s)
            await asyncio.sleep(TEACHES_S)  # from then on a reload keeps the stick table
            await run.steady("steady")
            for fault in faults:
                await fault(run)
                await run.steady("steady again")
        assert all(sample.status == 200 for sample in load.samples if sample.kind == "rank")
        if f.times is LIGHT:
            assert f.begun().most_common(1)[0][1] == 1  # no signal was begun twice


async def test_a_fleet_loses_no_rank(tmp_path: Path) -> None:
    await go(tmp_path, [crash, freeze, reload, grow, roll], is_light=True, per_s=30, settle_s=3.5)


@pytest.mark.chaos
async def test_a_fleet_of_real_instances_loses_no_rank(tmp_path: Path) -> None:
    rate = float(os.environ.get("CHAOS_PAIRS_PER_S", "10"))
    await go(
        tmp_path, [crash, freeze, reload, grow, roll], is_light=False, per_s=rate, settle_s=10.0
    )
