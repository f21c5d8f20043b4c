"""A search finds the capacity of a service whose capacity is known, and says why it ended."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from npu_gr.replay.plan import ReplayOptions
from npu_gr.replay.report import Report, report
from npu_gr.replay.study import CLOSE_RATIO, RateSearchOptions, Study, name, search, sweep
from tests.replay.test_report import sample

OPTIONS = ReplayOptions(base_url="http://127.0.0.1:1", warmup_s=1.0)


class Pretended:
    """A service that answers in time up to a rate, a log with so many records, and processes that send up to a rate."""

    def __init__(self, capacity_per_s: float, num_records: int = 10**9, late_from: float = float("inf")) -> None:
        self.capacity_per_s, self.num_records, self.late_from = capacity_per_s, num_records, late_from
        self.runs: list[ReplayOptions] = []
        self.stop = asyncio.Event()

    async def __call__(self, options: ReplayOptions) -> tuple[Report, int]:
        self.runs.append(options)
        rate = options.rate or 1.0
        num = max(0, min(int(rate * (options.duration_s or 1.0)), self.num_records - options.skip))
        latency_s = 0.01 if rate <= self.capacity_per_s else 0.5
        lag_s = 0.1 if rate >= self.late_from * options.processes else 0.0
        samples = [sample(due_at=i / rate, latency_s=latency_s, lag_s=lag_s) for i in range(min(num, 50))]
        samples += [sample(due_at=num / rate, latency_s=latency_s, lag_s=lag_s)] if num else []
        return report(samples, 0.05, msgspec.to_builtins(options)), options.skip + num


async def found(service: Pretended, low: float, high: float) -> Study:
    within = RateSearchOptions(low_per_s=low, high_per_s=high, step_s=10.0)
    return await search(service, OPTIONS, within, service.stop)


@pytest.mark.parametrize("capacity", [10.0, 37.0, 333.0])
async def test_the_highest_rate_is_found_to_a_twentieth(capacity: float) -> None:
    service = Pretended(capacity)
    study = await found(service, 5.0, 2000.0)
    assert study.highest_per_s is not None
    assert capacity / CLOSE_RATIO <= study.highest_per_s <= capacity
    assert len(study.runs) == len(service.runs) <= 24
    assert "breaks it" in study.ended
    assert {options.duration_s for options in service.runs} == {11.0}
    assert [o.skip for o in service.runs] == sorted({o.skip for o in service.runs})  # each goes on where one ended


async def test_a_search_that_meets_an_end_says_so() -> None:
    assert (await found(Pretended(1000.0), 10.0, 50.0)).highest_per_s == 50.0
    low = await found(Pretended(1.0), 10.0, 50.0)
    assert (low.highest_per_s, "low end" in low.ended) == (None, True)
    late = await found(Pretended(1e9, late_from=40.0), 10.0, 1000.0)
    told = "the load generator was late at 40/s with 1 process: it is the limit here, not the service"
    assert (late.highest_per_s, late.ended) == (20.0, told)


async def test_a_late_load_generator_gets_more_processes_until_it_has_all() -> None:
    service = Pretended(300.0, late_from=40.0)  # each process makes 40/s
    told: list[str] = []
    within = RateSearchOptions(low_per_s=30.0, high_per_s=1000.0, step_s=10.0, max_processes=6)
    study = await search(service, OPTIONS, within, service.stop, told.append)
    tried = [(options.rate, options.processes) for options in service.runs]
    assert tried == [(30, 1), (60, 1), (60, 2), (120, 2), (120, 4), (240, 4), (240, 6)]
    assert told[0] == "the load generator was late at 60/s (P99 100.0 ms): 2 processes from here on"
    assert (len(told), study.highest_per_s) == (3, 120.0)
    assert study.ended == "the load generator was late at 240/s with 6 processes: it is the limit here, not the service"
    assert [name(run) for run in study.runs][2:4] == ["poisson 60/s, 2 processes", "poisson 120/s, 2 processes"]
    enough = Pretended(50.0, late_from=40.0)
    study = await search(enough, OPTIONS, within, enough.stop)
    assert study.highest_per_s == pytest.approx(50, rel=0.05)
    assert {options.processes for options in enough.runs[2:]} == {2}


async def test_a_log_that_runs_dry_is_begun_anew() -> None:
    service = Pretended(1e9, num_records=1000)
    study = await found(service, 30.0, 60.0)
    assert [options.skip for options in service.runs] == [0, 330, 0] or study.highest_per_s == 60.0
    assert study.highest_per_s == 60.0


async def test_a_stop_ends_it_with_what_there_is() -> None:
    service = Pretended(1000.0)
    service.stop.set()
    study = await found(service, 10.0, 50.0)
    assert (len(study.runs), study.ended) == (1, "interrupted")
    runs = [msgspec.structs.replace(OPTIONS, rate=rate) for rate in (1.0, 2.0)]
    assert len((await sweep(service, runs, service.stop)).runs) == 1
    assert len((await sweep(service, runs, asyncio.Event())).runs) == 2


def test_options_are_checked() -> None:
    values: dict[str, Any] = {"low_per_s": 0.0, "high_per_s": 1.0}
    with pytest.raises(msgspec.ValidationError, match="low_per_s"):
        msgspec.convert(values, RateSearchOptions)
