"""An outage of all instances refuses nobody once they are back, and a frozen instance costs its users little.

The router and the instances are processes of their own; the instances have no model.
"""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

from tests.router.chaos import USERS, Fleet, Load, Sample, fleet

NAMES = ("a", "b", "c")
PAIRS_PER_S = 40


async def all_up(f: Fleet) -> None:
    await f.until(lambda rows: sum(row["health"] == "up" for row in rows) == len(NAMES))


def bad(samples: list[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.status not in (200, 202)]


async def test_after_an_outage_of_all_no_signal_and_no_rank_is_refused(tmp_path: Path) -> None:
    async with fleet(tmp_path, *NAMES, is_light=True) as f:
        for name in NAMES:
            f.instances[name].signal(signal.SIGKILL)
            await f.instances[name].ended()
        await f.until(lambda rows: all(row["health"] == "down" for row in rows))
        for name in NAMES:
            f.launch(name)
        await all_up(f)
        load = Load(f.port, PAIRS_PER_S, f.times)
        async with load.running():
            await f.whole(len(NAMES))
        assert bad(load.samples) == []
        homes = {user: f.home(user, NAMES) for user in USERS}
        away = [sample for sample in load.samples if sample.instance != homes[sample.user]]
        assert len(away) < 0.2 * len(load.samples), "all came back together, so nobody has to stand in for another"


async def test_a_frozen_instance_costs_a_rank_and_a_signal_less_than_half_of_its_budget(tmp_path: Path) -> None:
    async with fleet(tmp_path, *NAMES, is_light=True) as f:
        load = Load(f.port, PAIRS_PER_S, f.times)
        async with load.running():
            await asyncio.sleep(0.5)
            f.instances["b"].signal(signal.SIGSTOP)
            frozen_at = time.monotonic()
            await f.until(lambda rows: any(row["name"] == "b" and row["health"] == "down" for row in rows))
            thawed_at = time.monotonic()
            f.instances["b"].signal(signal.SIGCONT)
        window = await load.window(frozen_at - 0.2, thawed_at)
        assert bad(window.samples) == []
        took_s = max(sample.took_s for sample in window.samples)
        assert took_s < 0.45 * f.times.budget_s, "a second try goes out after a quarter"
