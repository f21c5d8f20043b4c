"""What `python -m benchmarks door` concludes from its runs: one line a row, with its target."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.door_costs import Density, RefusalCost
from benchmarks.door_flood import Flooded
from benchmarks.door_loads import REFERENCE_CLIENTS, LoadRun
from benchmarks.line import Line

CLOSED = 0.95  # of the best
POISSON = {3.0: 0.85, 10.0: 0.6}  # of the best, by the multiple of the capacity
WORST_SECOND = 0.5  # of the mean second, at those multiples
WHOLE_BURST = 24  # ranks at once of which none may be refused
BURST_SLACK = 0.01  # of what is due: lost by one stall of a shared machine
SMALL_P99 = 1.3  # of quiet
FLOOD_HITS = 0.95  # of quiet
FLOOD_P99 = 1.2  # of quiet
REFUSALS = 0.05  # of a core
DENSITY = 1.3  # of the better peer


def of_loads(
    runs: Sequence[dict[str, LoadRun]], case: str, arms: tuple[str, str], ablations: Sequence[str]
) -> Iterator[Line]:
    """The lines of all loads.

    Args:
        runs: of each load, by the name of the server.
        case: what ranks look like.
        arms: names of the server as configured, and of that with admission off.
        ablations: names of the others.
    """
    on_name, off_name = arms
    for rows in runs:
        on = rows[on_name]
        off = rows[off_name]
        match on.load.group:
            case "closed" | "poisson":
                yield from _goodput(on, off, case)
            case "bursts":
                yield _burst(on, off)
            case "pause":
                yield _normal(on, off)
            case _:
                pass  # the small tenant: both rows together, below
        if on.load.group != "fair":
            yield _reference(on, off)
        for name in ablations:
            yield _ablated(on, rows[name], name)
    yield from _fair([rows[on_name] for rows in runs if rows[on_name].load.group == "fair"])


def of_repeats(repeats: Sequence[Sequence[Line]]) -> Iterator[Line]:
    """Of the lines of loads that ran several times: each by the run whose ratio is the median.

    What the others came to is told beside it: the median of bursts hides one that was refused.

    Args:
        repeats: of each time, the same lines.
    """
    for same in zip(*repeats, strict=True):
        if len(same) == 1:
            yield same[0]
            continue
        ratios = ", ".join(f"{line.ratio:.2f}" for line in same)
        ascending = sorted(same, key=lambda line: -math.inf if math.isnan(line.ratio) else line.ratio)
        middle = ascending[(len(same) - 1) // 2]  # of an even number the lower one
        reached = f"; {sum(map(bool, (line.ok for line in same)))} of {len(same)} ok" if middle.ok is not None else ""
        yield replace(middle, case=f"{middle.case}; the median of {ratios}{reached}")


def of_flood(quiet: Flooded, beside: Flooded) -> Iterator[Line]:
    """The lines of a tenant beside another that floods signals.

    Args:
        quiet: the tenant alone.
        beside: and during the flood.
    """
    case = f"{beside.signals_per_s:.0f} signals/s of another tenant, {beside.num_ranks} ranks"
    hits = _ratio(beside.hit_ratio, quiet.hit_ratio)
    yield _line(
        f"flood: prefixes found beside {case}",
        beside.hit_ratio * 100,
        "% of ranks",
        "quiet",
        quiet.hit_ratio * 100,
        hits,
        FLOOD_HITS,
        hits >= FLOOD_HITS,
    )
    ratio = _ratio(beside.p99_ms, quiet.p99_ms)
    yield _line(
        f"flood: P99 beside {case}",
        beside.p99_ms,
        "ms",
        "quiet",
        quiet.p99_ms,
        1 / ratio if ratio else math.inf,
        1 / FLOOD_P99,
        ratio <= FLOOD_P99,
    )


def of_refusals(cost: RefusalCost | None, runs: Sequence[LoadRun]) -> Line:
    """The line of the most refusals a second of all loads, times what one takes.

    Args:
        cost: of a refusal; None = it cannot be told.
        runs: of the server as configured.
    """
    most = max(runs, key=lambda found: found.refused_per_s, default=None)
    refused_per_s = 0.0 if most is None else most.refused_per_s
    name = "no load" if most is None else most.load.name
    cpu_s = math.nan if cost is None else cost.cpu_s
    share = 0.0 if not refused_per_s else cpu_s * refused_per_s
    told = "what one takes cannot be told"
    if cost is not None:
        told = f"{cpu_s * 1e6:.1f} us each from {cost.from_per_s:.0f} to {cost.to_per_s:.0f}/s"
    return _line(
        f"refusals: {refused_per_s:.0f}/s at most ({name}), {told}",
        share * 100,
        "% of a core",
        "the target",
        REFUSALS * 100,
        REFUSALS / share if share else math.inf,
        1.0,
        share <= REFUSALS,
    )


def of_density(found: dict[str, Density | None], ours: str, peers: Sequence[str], goal_s: float) -> Iterator[Line]:
    """Ranks a core second at a P99 within the goal: ours beside the better peer, and every other server.

    Args:
        found: by the server's name; None = its P99 is over the goal with one client.
        ours: the name of ours.
        peers: names of the peers that ran.
        goal_s: of the P99.
    """
    rates = {name: 0.0 if best is None else best.ranks_per_core_s for name, best in found.items()}
    better = max(peers, key=rates.__getitem__, default=None)
    for name, best in found.items():
        told = "P99 over it with one client" if best is None else _density_case(best)
        is_ours = name == ours and better is not None
        value = rates[better] if better is not None else math.nan
        yield _line(
            f"ranks a core, P99 <= {goal_s * 1e3:.0f} ms: {name}, {told}",
            rates[name],
            "ranks/core s",
            better or "no peer ran",
            value,
            rates[name] / value if value else math.inf,
            DENSITY if is_ours else None,
            rates[name] >= DENSITY * value if is_ours else None,
        )


def _density_case(best: Density) -> str:
    return f"{best.clients} clients, {best.ranks_per_s:.0f}/s, P99 {best.p99_ms:.0f} ms"


def _goodput(on: LoadRun, off: LoadRun, case: str) -> Iterator[Line]:
    target = CLOSED if on.load.group == "closed" else POISSON.get(on.load.size)
    has_fewer = on.load.group == "closed" and on.load.size < REFERENCE_CLIENTS  # they cannot ask for as much
    best = off.main.good_per_s
    if not has_fewer:
        best = max(on.reference_per_s, off.reference_per_s, best)
    ratio = _ratio(on.main.good_per_s, best)
    yield _line(
        f"{on.load.name}: {_told(on)}; off {_told(off)}; {case}",
        on.main.good_per_s,
        "in time/s",
        "admission off" if has_fewer else "the best of both references and admission off",
        best,
        ratio,
        target,
        None if target is None else ratio >= target,
    )
    if on.load.group == "poisson" and target is not None:
        yield _line(
            f"{on.load.name}: the worst second",
            on.worst_second * on.main.good_per_s,
            "in time/s",
            "the mean second",
            on.main.good_per_s,
            on.worst_second,
            WORST_SECOND,
            on.worst_second >= WORST_SECOND,
        )
    if target is not None:
        yield _normal(on, off)


def _burst(on: LoadRun, off: LoadRun) -> Line:
    lost = on.main.lost / max(on.main.due, 1)
    lost_off = off.main.lost / max(off.main.due, 1)
    must_be_whole = on.load.size <= WHOLE_BURST
    return _line(
        f"{on.load.name}: {_told(on)}; off {_told(off)}",
        on.main.good_per_s,
        "in time/s",
        "admission off",
        off.main.good_per_s,
        _ratio(1 - lost, 1 - lost_off),
        1.0,
        on.main.refused == 0 if must_be_whole else lost <= lost_off + BURST_SLACK,
    )


def _reference(on: LoadRun, off: LoadRun) -> Line:
    client = on.client
    waited = on.main.main_thread_wait_s / on.main.span_s  # of the time: what other work took of the machine
    return _line(
        f"{on.load.name}: reference before {on.before_per_s:.0f}, after {on.after_per_s:.0f}; "
        f"client late {client.late_tick_ms.p99:.1f} ms at P99, {client.cpu_s / client.ran_s:.2f} of a core; "
        f"the event loop waited for a core {waited:.0%} of the load",
        on.reference_per_s,
        "in time/s",
        "admission off's reference",
        off.reference_per_s,
        _ratio(on.reference_per_s, off.reference_per_s),
        None,
        None,
    )


def _normal(on: LoadRun, off: LoadRun) -> Line:
    usual = on.usual.better(off.usual)
    ours_s = on.normal_after_s(usual)
    return _line(
        f"{on.load.name}, then normal (off: {off.normal_after_s(usual):.2f} s)",
        ours_s,
        "s",
        "the target",
        on.load.normal_s,
        on.load.normal_s / ours_s if ours_s else math.inf,
        1.0,
        ours_s <= on.load.normal_s,
    )


def _ablated(on: LoadRun, other: LoadRun, name: str) -> Line:
    return _line(
        f"{on.load.name}: {_told(on)}; {name} {_told(other)}",
        on.main.good_per_s,
        "in time/s",
        name,
        other.main.good_per_s,
        _ratio(on.main.good_per_s, other.main.good_per_s),
        None,
        None,
    )


def _fair(runs: Sequence[LoadRun]) -> Iterator[Line]:
    """The small tenant alone, then beside the hot one; each is a run."""
    if len(runs) < 2:
        return
    quiet, beside = runs
    yield _line(
        f"{beside.load.name}: refused of {beside.main.due}",
        beside.main.refused,
        "refused",
        "quiet",
        quiet.main.refused,
        1.0 if beside.main.refused == 0 else 0.0,
        1.0,
        beside.main.refused == 0,
    )
    ratio = _ratio(beside.main.answered_ms.p99, quiet.main.answered_ms.p99)
    yield _line(
        f"{beside.load.name}: P99, {beside.main.in_time} of {beside.main.due} in time; hot {_hot(beside)}",
        beside.main.answered_ms.p99,
        "ms",
        "quiet",
        quiet.main.answered_ms.p99,
        1 / ratio if ratio else math.inf,
        1 / SMALL_P99,
        ratio <= SMALL_P99 and beside.main.answered_ms.count > 0,
    )


def _hot(found: LoadRun) -> str:
    hot = found.client.stream("hot")
    return f"{hot.good_per_s:.0f}/s in time, {hot.refused_per_s:.0f}/s refused"


def _told(found: LoadRun) -> str:
    main = found.main
    gone = main.timeouts + main.errors + main.other
    return (
        f"{main.good_per_s:.0f} in time, {main.refused_per_s:.0f} refused, {main.late / main.span_s:.0f} late, "
        f"{gone / main.span_s:.0f} lost a second, P99 {main.answered_ms.p99:.0f} ms"
    )


def _ratio(one: float, other: float) -> float:
    """How many times as good; nan = neither did anything, which reaches no target."""
    if not other:
        return math.inf if one else math.nan
    return one / other


def _line(
    case: str,
    ours: float,
    unit: str,
    baseline: str,
    value: float,
    ratio: float,
    target: float | None,
    ok: bool | None,
) -> Line:
    return Line(
        bench="door",
        case=case,
        ours=ours,
        unit=unit,
        baseline=baseline,
        baseline_value=value,
        ratio=ratio,
        target=target,
        ok=ok,
    )
