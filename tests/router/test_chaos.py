"""Whatever happens to an instance, every request has an answer, and only the users of that instance notice.

They die, stop, slow down, drain, join and change their model; the fleet is whole again by itself.

The short run has light instances; the long one (-m chaos) has three `npu-gr serve` and prints its figures (-s).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.router.chaos import LIGHT, USERS, Fleet, Load, Window, fleet

NAMES = ("a", "b", "c")
_STEADY_S = 60.0


class Run:
    """A fleet under load, and the checks after each fault."""

    def __init__(self, f: Fleet, load: Load, settle_s: float) -> None:
        self.fleet = f
        self.load = load
        self._settle_s = settle_s
        self.names: tuple[str, ...] = NAMES
        self._failing: list[Window] = []  # where errors may be

    def users(self, name: str) -> set[str]:
        return {user for user in USERS if self.fleet.home(user, self.names) == name}

    def at_home(self, window: Window, users: set[str]) -> float:
        """The ratio of ranks served by their owner; on a busy machine a late first try may go to another instance."""
        ranks = [sample for sample in window.of(users) if sample.kind == "rank"]
        return sum(sample.instance == self.fleet.home(sample.user, self.names) for sample in ranks) / len(ranks)

    async def steady(self, what: str) -> None:
        """Wait until, for a while, nearly all ranks are hits and are served by their owners."""
        async with asyncio.timeout(_STEADY_S):
            is_steady = False
            while not is_steady:
                from_at = time.monotonic()
                await asyncio.sleep(self._settle_s)
                window = await self.load.window(from_at, time.monotonic())
                print(window.line(what))  # noqa: T201  (the figures, with -s)
                is_steady = window.hit_ratio(set(USERS)) > 0.97 and self.at_home(window, set(USERS)) > 0.97

    async def fault(self, what: str, victim: str | None, since_at: float, may_fail: bool) -> None:
        """Check after a fault that only the users of the instance at fault have noticed it."""
        took_s = await self.fleet.whole(len(self.names))
        window = await self.load.window(since_at, time.monotonic())
        theirs = self.users(victim) if victim else set()
        others = set(USERS) - theirs
        print(window.line(f"{what} (whole after {took_s:.1f} s)"))  # noqa: T201
        assert not window.lost
        if may_fail:
            self._failing.append(window)
            assert {sample.user for sample in window.errors} <= theirs
        else:
            assert not window.errors, window.errors[:3]
        assert window.hit_ratio(others) > 0.97
        assert self.at_home(window, others) > 0.9

    def finish(self) -> None:
        """Check that errors were only in the windows in which they may be, and that every request had an answer."""
        samples = self.load.samples
        errors = {sample for sample in samples if sample.status not in (200, 202)}
        assert errors <= {sample for window in self._failing for sample in window.errors}
        assert all(sample.status for sample in samples)


async def crash(run: Run) -> None:
    victim = run.fleet.instances["a"]
    since_at = time.monotonic()
    victim.signal(signal.SIGKILL)
    await victim.ended()
    await run.fleet.until(lambda rows: any(r["name"] == "a" and r["health"] == "down" for r in rows))
    await asyncio.sleep(1.0)
    run.fleet.launch("a")
    await run.fault("kill -9, start again", "a", since_at, may_fail=True)


async def freeze(run: Run) -> None:
    since_at = time.monotonic()
    run.fleet.instances["b"].signal(signal.SIGSTOP)
    await asyncio.sleep(2.0)
    if run.fleet.times is LIGHT:  # where checks have more time
        await run.fleet.until(lambda rows: any(r["name"] == "b" and r["health"] == "down" for r in rows))
    run.fleet.instances["b"].signal(signal.SIGCONT)
    await run.fault("SIGSTOP for 2 s", "b", since_at, may_fail=True)


async def drain(run: Run) -> None:
    since_at = time.monotonic()
    await run.fleet.admin("instances/c/drain")
    await run.fleet.until(lambda rows: any(r["name"] == "c" and not r["takes_ranks"] for r in rows))
    await run.fleet.admin("instances/c/undrain")
    await run.fault("drain, undrain", "c", since_at, may_fail=False)


async def slow(run: Run) -> None:
    """Give an instance a tenth of the processor for 4 s."""
    victim = run.fleet.instances["a"]
    since_at = time.monotonic()
    while time.monotonic() - since_at < 4.0:
        victim.signal(signal.SIGSTOP)
        await asyncio.sleep(0.09)
        victim.signal(signal.SIGCONT)
        await asyncio.sleep(0.01)
    await run.fault("10x slower for 4 s", "a", since_at, may_fail=True)


async def grow(run: Run) -> None:
    since_at = time.monotonic()
    before = run.names
    run.fleet.launch("d")
    await asyncio.sleep(0)
    run.names = (*before, "d")
    run.fleet.announce(*run.names)
    moved = {user for user in USERS if run.fleet.home(user, before) != run.fleet.home(user, run.names)}
    assert moved == run.users("d")
    await run.fault("one more joins", "d", since_at, may_fail=False)


async def restart(run: Run, name: str = "a") -> None:
    since_at = time.monotonic()
    run.fleet.instances[name].signal(signal.SIGTERM)
    assert await run.fleet.instances[name].ended() == 0
    run.fleet.launch(name, "new")
    await run.fault(f"new model on {name}", name, since_at, may_fail=False)


async def roll(run: Run) -> None:
    for name in run.names:
        await restart(run, name)
    versions = {sample.version for sample in run.load.samples[-50:] if sample.kind == "rank"}
    assert len(versions) == 1
    assert versions != {run.load.samples[50].version}


async def go(
    folder: Path, faults: list[Callable[[Run], object]], is_light: bool, per_s: float, settle_s: float
) -> None:
    async with fleet(folder, *NAMES, is_light=is_light) as f:
        load = Load(f.port, per_s, f.times)
        async with load.running():
            run = Run(f, load, settle_s)
            await asyncio.sleep(1.0)
            await run.steady("steady")
            for fault in faults:
                await fault(run)  # type: ignore[misc]
            await run.steady("steady again")
        run.finish()


async def test_a_fleet_survives_a_crash_a_freeze_a_drain_and_a_restart(tmp_path: Path) -> None:
    await go(tmp_path, [crash, freeze, drain, restart], is_light=True, per_s=30, settle_s=1.5)


@pytest.mark.chaos
async def test_a_fleet_of_real_instances_survives_everything(tmp_path: Path) -> None:
    rate = float(os.environ.get("CHAOS_PAIRS_PER_S", "10"))
    await go(tmp_path, [crash, freeze, slow, drain, grow, roll], is_light=False, per_s=rate, settle_s=10.0)
