"""Several runs of one log: a sweep over settings, or a search for the highest rate that keeps the SLO."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table

from npu_gr.core.settings import Positive, Seconds
from npu_gr.replay.plan import ProcessCount, ReplayOptions
from npu_gr.replay.report import Report
from npu_gr.replay.tally import HITS

CLOSE_RATIO = 1.05  # the search ends when the lowest rate that fails is at most so far from the highest that does not
MAX_STEPS = 24

Play = Callable[[ReplayOptions], Awaitable[tuple[Report, int]]]  # one run -> its report, and the first record not read


class RateSearchOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rates to search, and what it means that a rate keeps the SLO."""

    low_per_s: Positive
    high_per_s: Positive
    step_s: Seconds = 20.0  # of sending at one rate, after the warm-up
    target_ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.99  # of the ranks that must be within the SLO
    max_processes: ProcessCount = 1  # of the load generator, which takes more of them where it is late


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Reports of several runs, in the order they were made."""

    runs: list[Report] = field(default_factory=list)
    highest_per_s: float | None = None  # of a search: the highest rate that was run and kept the SLO
    ended: str = ""  # of a search: why

    def as_dict(self) -> dict[str, Any]:
        """Plain values that JSON has."""
        search = {"highest_per_s": self.highest_per_s, "ended": self.ended} if self.ended else None
        return {"runs": [run.as_dict() for run in self.runs], "search": search}

    def to_json(self) -> str:
        """`as_dict` as text. A figure that could not be measured is null."""
        return msgspec.json.format(msgspec.json.encode(self.as_dict()), indent=2).decode()

    def render(self) -> RenderableType:
        """Tables for a terminal: one run has tables of its own, of several each is a row."""
        if len(self.runs) == 1 and not self.ended:
            return self.runs[0].render()
        columns = (
            "offered/s",
            "goodput/s",
            "within SLO",
            "P50 ms",
            "P99 ms",
            "hits",
            "cached tokens",
            "send-lag P99 ms",
        )
        run_column = Column("run", no_wrap=True)
        table = Table(run_column, *columns, box=box.SIMPLE, title=f"ranks within {self.runs[0].slo_s * 1e3:g} ms")
        for run in self.runs:
            table.add_row(*row(run))
        if not self.ended:
            return table
        found = "none" if self.highest_per_s is None else f"{self.highest_per_s:.3g} ranks/s"
        return Group(table, f"highest rate that keeps the SLO: {found} ({self.ended})")


def name(run: Report) -> str:
    """What sets this run apart from the others: its arrivals, and who made them."""
    settings = run.settings
    by = f", {settings['processes']} processes" if settings.get("processes", 1) > 1 else ""
    return _arrivals(settings) + by


def _arrivals(settings: dict[str, Any]) -> str:
    if settings["closed"] is not None:
        return f"closed, {settings['closed']} in flight"
    if settings["rate"] is not None:
        ramp = "" if settings["ramp_to"] is None else f" to {settings['ramp_to']:g}"
        return f"{settings['arrival']} {settings['rate']:.4g}{ramp}/s"
    return f"log x {settings['speed']:g}"


def row(run: Report) -> list[str]:
    """A run's line in the table of several."""
    return [
        name(run) + (", interrupted" if run.interrupted else ""),
        f"{run.offered_per_s:.1f}",
        f"{run.goodput_per_s:.1f}",
        f"{run.attainment_ratio:.2%}",
        f"{run.latency_ms('rank', 'p50'):.2f}",
        f"{run.latency_ms('rank', 'p99'):.2f}",
        f"{sum(run.hit_ratio(hit) for hit in HITS):.1%}",
        f"{run.prefix_tokens_ratio:.1%}",
        f"{run.lag_ms['p99']:.2f}" + (" LATE" if run.was_late else ""),
    ]


async def sweep(play: Play, options: Sequence[ReplayOptions], stop: asyncio.Event) -> Study:
    """One run for each of `options`, one after the other, each from the log's start.

    Args:
        play: one run.
        options: of the runs.
        stop: once it is set, no further run begins.
    """
    runs = []
    for each in options:
        runs.append((await play(each))[0])
        if stop.is_set():
            break
    return Study(runs=runs)


async def search(
    play: Play,
    options: ReplayOptions,
    within: RateSearchOptions,
    stop: asyncio.Event,
    tell: Callable[[str], None] = lambda _text: None,
) -> Study:
    """Find the highest rate: double it from the low end until the SLO breaks, then bisect (by the geometric mean).

    Every step continues in the log where the one before it stopped, and starts over if too little is left. So no step
    is answered from prefixes that the step before it left in the service. A step in which the load generator was late
    says nothing about the service: its rate is run again by twice as many processes, up to `within.max_processes`.

    Args:
        play: one run.
        options: of every run, but for the rate, the length and the part of the log; `processes` is how many begin.
        within: the rates, and the SLO.
        stop: set it to end the search early.
        tell: called with a sentence when there will be more processes.
    """
    runs: list[Report] = []
    skip = 0
    rate = within.low_per_s
    processes = options.processes
    best: float | None = None  # the highest rate that kept the SLO
    worst: float | None = None  # the lowest rate that broke it
    for _ in range(MAX_STEPS):
        step = msgspec.structs.replace(
            options,
            rate=rate,
            speed=1.0,
            skip=skip,
            duration_s=within.step_s + options.warmup_s,
            processes=processes,
        )
        report, skip = await play(step)
        if report.settings["skip"] and _ran_dry(report, within) and not stop.is_set():
            report, skip = await play(msgspec.structs.replace(step, skip=0))
        runs.append(report)
        if stop.is_set():
            return Study(runs=runs, highest_per_s=best, ended="interrupted")
        if report.was_late and processes < within.max_processes:
            late = f"the load generator was late at {rate:.3g}/s (P99 {report.lag_ms['p99']:.1f} ms)"
            processes = min(2 * processes, within.max_processes)
            tell(f"{late}: {processes} processes from here on")
            continue
        if report.was_late:
            by = "1 process" if processes == 1 else f"{processes} processes"
            ended = f"the load generator was late at {rate:.3g}/s with {by}: it is the limit here, not the service"
            return Study(runs=runs, highest_per_s=best, ended=ended)
        if report.attainment_ratio >= within.target_ratio:
            best = rate
        else:
            worst = rate
        if worst is None:
            if rate >= within.high_per_s:
                return Study(runs=runs, highest_per_s=best, ended=f"the SLO holds at the high end, {rate:.3g}/s")
            rate = min(2 * rate, within.high_per_s)
        elif best is None:
            return Study(runs=runs, ended=f"the SLO breaks at the low end, {rate:.3g}/s")
        elif worst <= best * CLOSE_RATIO:
            return Study(runs=runs, highest_per_s=best, ended=f"{worst:.3g}/s breaks it")
        else:
            rate = (best * worst) ** 0.5
    return Study(runs=runs, highest_per_s=best, ended=f"{MAX_STEPS} steps")


def _ran_dry(report: Report, within: RateSearchOptions) -> bool:
    """Whether the log ended before four fifths of the step."""
    return not report.interrupted and report.duration_s < 0.8 * within.step_s
