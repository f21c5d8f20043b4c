"""The search finds the crossing; all arms get the same traffic, each served as its name says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import relay
from benchmarks.relay import (
    DRAM,
    FULL,
    RELAY,
    STEP,
    STEPS,
    RateSearch,
    drawn,
    last,
    lines,
    mixed,
    of_trace,
)
from benchmarks.relay_rig import Arm, ArmOutcomes, Idle, Rig, ServedArm, Shape, measure_idle
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.core.request import Outcome

LEAD_S = 2.0  # a prefill has begun by then on a busy machine too; else a rank is a miss
SHAPE = Shape(num_tokens=96, num_candidates=8, num_layers=2, dim=64)


@pytest.fixture(scope="module")
def rig() -> Rig:
    made = Rig(SHAPE, CPUBackend(), 0)
    made.idle = Idle(0.01, 0.01, 0.001, 0.005)
    return made


@given(stop=st.integers(1, 20), crossing=st.integers(-1, 20), start=st.integers(-3, 25))
def test_the_last_that_holds_is_found_and_nothing_is_asked_twice(
    stop: int, crossing: int, start: int
) -> None:
    asked = list[int]()

    async def holds(step: int) -> bool:
        asked.append(step)
        return step <= crossing

    assert asyncio.run(last(holds, start, stop)) == min(crossing, stop - 1)
    assert len(asked) == len(set(asked))
    assert all(0 <= step < stop for step in asked)


async def test_the_last_rate_that_holds_is_found_and_what_is_known_is_not_run_again() -> None:
    runs = list[int]()

    class Instant:
        """Latency grows by a tenth a step; a run is given up at the second that is late."""

        rig = SimpleNamespace(idle=Idle(0.1, 0.1, 0.1, 0.1))

        async def run(self, step: int, _patience_s: float, goal_s: float) -> ArmOutcomes:
            runs.append(step)
            latency_s = np.full(100, 0.1 * 1.1**step, np.float32)
            if latency_s[0] > goal_s:
                latency_s[2:] = np.nan
            return ArmOutcomes(latency_s, {}, 0.0, 0.0)

    served: Any = Instant()
    search = RateSearch(
        served, lambda _rig, rate, _count, _seed: round(np.log(rate) / np.log(STEP)), 100, 0.1, 0
    )
    assert search.rate_per_s(3) == pytest.approx(STEP**3)
    assert await search.sustained(0.15, 9) == 4
    assert await search.sustained(0.05, 9) == -1
    # a run that was given up is late for this goal too: not run again
    assert await search.sustained(0.16, 4) == 4
    assert len(runs) == len(set(runs))
    assert await search.sustained(0.2, 4) == 7  # or has to be
    assert len(runs) > len(set(runs))
    assert await search.sustained(99.9, 0) == STEPS - 1


def test_99_of_100_must_be_in_time() -> None:
    latency_s = np.arange(1, 201, dtype=np.float32)
    assert ArmOutcomes(latency_s, {}, 0.0, 0.0).holds(198.0)
    assert ArmOutcomes(latency_s, {}, 0.0, 0.0).holds(197.0) is False
    latency_s[:3] = np.inf
    assert ArmOutcomes(latency_s, {}, 0.0, 0.0).holds(1e9) is False
    latency_s[2:] = np.nan
    assert ArmOutcomes(latency_s, {}, 0.0, 0.0).holds(1e9) is None


def test_every_arm_gets_the_same_users_at_the_same_instants(rig: Rig) -> None:
    some = drawn(0.0, rig, 5.0, 40, 3)
    others = drawn(0.5, rig, 5.0, 40, 3)
    assert [v.arrives_at for v in some] == [v.arrives_at for v in others]
    back = [v.user.user.startswith("back") for v in others]
    assert 10 < sum(back) < 30
    for one, other, returns in zip(some, others, back, strict=True):
        assert returns or (
            one.user == other.user and one.events.fingerprint() == other.events.fingerprint()
        )
    assert (
        mixed(rig, 5.0, 40, 3)[7].events.fingerprint()
        == mixed(rig, 9.0, 40, 3)[7].events.fingerprint()
    )


def test_a_trace_says_who_comes_back(rig: Rig) -> None:
    sessions = [*range(140), 200, 139, 200, 300, *range(400, 460)]
    twice = 0
    for seed in range(20):
        visits = of_trace(sessions, rig, 5.0, 40, seed)
        numbers = [int(v.user.user.split()[-1]) for v in visits]
        start = next(i for i in range(len(sessions)) if sessions[i : i + 40] == numbers)
        recent = set(list(dict.fromkeys(reversed(sessions[:start])))[: rig.dram_prefixes // 2])
        assert [v.user.user.startswith("back") for v in visits] == [n in recent for n in numbers]
        histories = [v.events.fingerprint() for v in visits if v.user.user.endswith(" 200")]
        twice += len(histories) == 2
        assert len(set(histories)) <= 1  # one user, one history
    assert twice


@asynccontextmanager
async def run(
    rig: Rig, arm: Arm, reuse: float, count: int = 12
) -> AsyncIterator[tuple[ServedArm, ArmOutcomes]]:
    async with rig.serving(arm, 1000.0) as served:
        served.engine.copy_bytes_per_s = float("inf")  # of so short a prefix a reload would not pay
        yield served, await served.run(drawn(reuse, rig, 15.0, count, 1), 30.0, lead_s=LEAD_S)


async def test_an_arm_is_served_as_its_name_says(rig: Rig) -> None:
    async with run(rig, FULL, 0.0) as (_, found):
        assert found.shares == {Outcome.MISS_FULL: 1.0}
        assert np.isfinite(found.latency_s).all()
    async with run(rig, RELAY, 0.0) as (served, found):
        assert set(found.shares) <= {Outcome.HBM_HIT, Outcome.JOINED}
        assert (found.reloaded, found.wasted) == (0.0, 0.0)
        assert len(served.pool) == 0  # nothing is left for the next run
    async with run(rig, DRAM, 1.0) as (served, found):
        assert found.reloaded > 0
        assert Outcome.MISS_FULL not in found.shares
        again = await served.run(drawn(1.0, rig, 60.0, 12, 1), 30.0)
        assert again.reloaded > 0  # how many depends on the speed: two reloads at a time
        assert len(served.dram) == 1  # what returns, for the next run
    async with rig.serving(RELAY, 1000.0) as served:
        visits = [
            visit._replace(is_ranked=number % 2 == 0)
            for number, visit in enumerate(drawn(0.0, rig, 60.0, 12, 1))
        ]
        found = await served.run(visits, 30.0, lead_s=LEAD_S)
        assert (len(found.latency_s), found.wasted) == (6, 0.5)


async def test_a_run_is_given_up_once_too_many_are_late(rig: Rig) -> None:
    async with rig.serving(RELAY, 1000.0) as served:
        found = await served.run(drawn(0.0, rig, 50.0, 200, 1), 30.0, goal_s=0.0)
        assert 3 <= np.isfinite(found.latency_s).sum() < 100
        assert found.holds(0.0) is False
        assert found.holds(1e9) is None
        assert not served.relay.is_busy
        assert served.pool.free_bytes == served.pool.budget_bytes


async def test_each_part_is_measured_alone_and_checked(rig: Rig) -> None:
    idle = await measure_idle(rig)
    assert min(idle) > 0


def test_the_whole_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MIXED", 20)
    trace = tmp_path / "trace.jsonl"
    rows = (
        f'{{"timestamp": {n}, "input_length": 9, "hash_ids": [0, {n % 50}]}}\n' for n in range(400)
    )
    trace.write_text("".join(rows))
    found = list(lines("cpu", (96,), (4,), 2, 64, 0, 0, 40, 0.1, 0, trace))
    cases = " ".join(line.case for line in found)
    for part in (
        "prefill",
        "truncated",
        "relay, dram 75%",
        "dram trace",
        "best with",
        "longest history",
        "trigger",
    ):
        assert part in cases
    assert all(line.ratio >= 0 for line in found)
    assert [line.target for line in found if "best with" in line.case] == [3.6] * 3
