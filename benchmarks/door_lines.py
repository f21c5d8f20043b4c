"""The result lines of `python -m benchmarks door`, with their targets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.frame import Line, compared
from benchmarks.loadgen import StreamCounts
from benchmarks.loads import Run

BEHIND = "behind HAProxy"
ALONE = "alone"
BEFORE = "the code of before"
FASTAPI = "FastAPI"
REFERENCE = "plain aiohttp, {} clients"

# Targets.
PLANNED = 0.995  # share within the SLO at 1x; one stall of a shared machine costs the rest
# share of the capacity, by number of clients
CLOSED = {BEHIND: {4: 0.95, 16: 0.95, 64: 0.95, 256: 0.7}, ALONE: {4: 0.9, 16: 0.9, 64: 0.9}}
OVERLOAD = {3.0: 0.8}  # share of the capacity, behind HAProxy, by multiple
SLOW = 0.7  # share of the slowed capacity
LATE = 0.02  # share of late answers at 3x
WORST_SECOND = 0.5  # goodput of the worst second relative to the mean at 3x
NORMAL_S = 1.0  # time until normal after a pause or an overload
DENSITY = 1.15  # ranks a core relative to FastAPI


class Density(NamedTuple):
    """The best ranks per core of a server with a P99 within the goal."""

    ranks_per_core_s: float
    clients: int
    ranks_per_s: float
    p99_ms: float


def of_run(arm: str, found: Run) -> Iterator[Line]:
    """Yield the lines of one load on one arm; the code of before has no targets.

    Args:
        arm: Name of the arm.
        found: Results of the run.
    """
    load = found.load
    case = f"{load.name}, {arm}"
    is_new = arm != BEFORE
    must = is_new and arm == BEHIND
    match load.group:
        case "closed":
            yield _goodput(case, found, CLOSED.get(arm, {}).get(int(load.size)))
        case "poisson" if load.size < 1:
            share = found.main.in_time / max(found.main.due, 1)
            yield compared(
                "door", f"{case}: {summary(found)}",
                found.main.in_time, "within SLO", "due", found.main.due, share,
                *((1.0, share >= PLANNED) if must else ()),
            )  # fmt: skip
            ours, plain = found.cpu_s * 1e3, found.reference_cpu_s * 1e3
            yield compared(
                "door",
                f"{case}: CPU of a rank",
                ours,
                "ms",
                "plain, 8 clients",
                plain,
                plain / ours,
            )
        case "poisson":
            yield _goodput(case, found, OVERLOAD.get(load.size) if must else None)
        case "slow":
            yield _goodput(f"{case}, {found.slowed:.2f} of it", found, SLOW if must else None)
        case "bursts" | "fair":
            yield _rejected(f"{case}: {summary(found)}", found.main, is_new)
        case _:
            yield _normal(f"{case}: {summary(found)}", found, is_new)
    if load.group in ("poisson", "slow") and load.size > 1 and must:
        lost = found.main.unanswered
        yield compared(
            "door", f"{case}: lost", lost, "ranks", "due", found.main.due, float(not lost), 1.0
        )
    if load.group in ("poisson", "slow") and load.size == 3 and must:
        yield compared(
            "door", f"{case}: late",
            found.late_share * 100, "% of answers", "the target", LATE * 100,
            LATE / found.late_share if found.late_share else math.inf, 1.0,
        )  # fmt: skip
        yield compared(
            "door", f"{case}: the worst second",
            found.worst_second * found.main.good_per_s, "within SLO/s",
            "the mean second", found.main.good_per_s, found.worst_second, WORST_SECOND,
        )  # fmt: skip
    if load.group in ("closed", "poisson") and load.size > 1 and is_new:
        yield _normal(case, found, must=True)


def of_repeats(repeats: Sequence[Sequence[Line]]) -> Iterator[Line]:
    """Merge repeated lines: take the run with the median ratio, and list all ratios.

    The list matters because the median of bursts hides a single rejection.

    Args:
        repeats: The same lines for each repetition.
    """
    for same in zip(*repeats, strict=True):
        if len(same) == 1:
            yield same[0]
            continue
        ratios = ", ".join(f"{line.ratio:.2f}" for line in same)
        ascending = sorted(
            same, key=lambda line: -math.inf if math.isnan(line.ratio) else line.ratio
        )
        middle = ascending[(len(same) - 1) // 2]  # the lower one of an even number
        reached = (
            f"; {sum(map(bool, (line.ok for line in same)))} of {len(same)} ok"
            if middle.ok is not None
            else ""
        )
        yield replace(middle, case=f"{middle.case}; the median of {ratios}{reached}")


def of_density(found: dict[str, list[Density]], goal_s: float) -> Iterator[Line]:
    """Yield each server's ranks per core second, with a P99 within the goal, against FastAPI.

    Args:
        found: Results of each server's repetitions; 0 ranks = one client exceeds the P99.
        goal_s: Largest P99.
    """
    medians = {name: sorted(each)[(len(each) - 1) // 2] for name, each in found.items()}
    theirs = medians[FASTAPI].ranks_per_core_s if FASTAPI in medians else math.nan
    for name, best in medians.items():
        per_core = best.ranks_per_core_s
        yield compared(
            "door",
            f"ranks a core, P99 <= {goal_s * 1e3:.0f} ms: {name}, "
            f"{best.clients} clients, {best.ranks_per_s:.0f}/s, P99 {best.p99_ms:.0f} ms",
            per_core,
            "ranks/core s",
            FASTAPI if FASTAPI in medians else "FastAPI did not run",
            theirs,
            per_core / theirs if theirs else math.inf,
            DENSITY if name == ALONE and FASTAPI in medians else None,
        )


def summary(found: Run) -> str:
    """Describe the result of a run in one line."""
    main = found.main
    span_s = main.span_s
    text = (
        f"{main.good_per_s:.0f} within SLO, {main.rejected_per_s:.0f} rejected, "
        f"{main.late / span_s:.0f} late, "
        f"{main.unanswered / span_s:.0f} lost a second of {main.due / span_s:.0f}, "
        f"P50 {main.answered_ms.p50:.0f} P99 {main.answered_ms.p99:.0f} ms, "
        f"{found.cpu_s * 1e3:.2f} ms CPU a rank, "
        f"the client {found.client.cpu_s / found.client.ran_s:.2f} of a core"
    )
    if found.load.group == "fair":
        hot = found.client.stream("hot")
        text += f"; hot {hot.good_per_s:.0f}/s within SLO, {hot.rejected_per_s:.0f}/s rejected"
    return text


def _goodput(case: str, found: Run, target: float | None) -> Line:
    return compared(
        "door",
        f"{case}: {summary(found)}",
        found.main.good_per_s,
        "within SLO/s",
        REFERENCE.format(found.load.clients),
        found.capacity_per_s,
        found.ratio,
        target,
    )


def _rejected(case: str, counts: StreamCounts, has_target: bool) -> Line:
    rejected = counts.rejected
    return compared(
        "door",
        case,
        rejected,
        "rejected",
        "due",
        counts.due,
        float(not rejected),
        1.0 if has_target else None,
    )


def _normal(case: str, found: Run, must: bool) -> Line:
    after_s = found.normal_after_s
    ratio = NORMAL_S / after_s if after_s else math.inf
    return compared(
        "door",
        f"{case}: then normal",
        after_s,
        "s",
        "the target",
        NORMAL_S,
        ratio,
        1.0 if must else None,
    )
