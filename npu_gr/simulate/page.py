"""The results of simulations as a table for the terminal, as JSON, and as one HTML page that loads nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table

from npu_gr.core.request import Outcome
from npu_gr.replay.page import STYLE, Axis, areas, figure, lines, table
from npu_gr.simulate.capacity import Capacity
from npu_gr.simulate.fleet import FleetResult

_COLUMNS = (
    "instances", "within SLO", "P50 ms", "P99 ms", "HBM hits", "joined", "DRAM hits", "cached tokens",
    "pre-infers", "wasted", "device busy",
)  # fmt: skip


def row(found: FleetResult) -> list[str]:
    """Format the cells of one run."""
    sampled = "" if found.simulated == found.instances else f" ({found.simulated} simulated)"
    return [
        f"{found.instances}{sampled}",
        f"{found.attainment_ratio:.2%}",
        f"{found.latency_s(50) * 1e3:.2f}",
        f"{found.latency_s(99) * 1e3:.2f}",
        f"{found.hit_ratio(Outcome.HBM_HIT):.1%}",
        f"{found.hit_ratio(Outcome.JOINED):.1%}",
        f"{found.hit_ratio(Outcome.DRAM_HIT):.1%}",
        f"{found.prefix_tokens / max(found.history_tokens, 1):.1%}",
        f"{found.num_produced}",
        f"{found.wasted_ratio:.1%}",
        f"{found.busy_ratio:.0%}, at most {found.busiest_ratio:.0%}",
    ]


def answer(capacity: Capacity) -> str:
    """Say the result of a capacity search in words."""
    needed = "more than 1,000 instances" if capacity.needed is None else f"{capacity.needed} instances"
    return (
        f"{capacity.qps:g} ranks/s with {capacity.target_ratio:.1%} within the SLO need {needed}; "
        f"device time alone needs {capacity.at_least}"
    )


def render(found: Sequence[FleetResult], capacity: Capacity | None) -> Group:
    """Draw the tables for the terminal; the facts are those of the last run."""
    runs = Table(*_COLUMNS, title="Simulation, not a measurement")
    for one in found:
        runs.add_row(*row(one))
    facts = Table(show_header=False)
    for key, value in _facts(found[-1]):
        facts.add_row(key, value)
    return Group(runs, facts, *([answer(capacity)] if capacity else []))


def as_dict(found: Sequence[FleetResult], capacity: Capacity | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Make plain types for JSON.

    Args:
        found: a result for each run.
        capacity: result of the capacity search, if there was one.
        settings: of the simulation, as plain types.
    """
    table: dict[str, Any] = {"settings": settings, "runs": [one.as_dict() for one in found]}
    if capacity is not None:
        table["capacity"] = {
            "qps": capacity.qps,
            "target_ratio": capacity.target_ratio,
            "instances": capacity.needed,
            "device_time_needs": capacity.at_least,
        }
    return table


def page(found: Sequence[FleetResult], capacity: Capacity | None, settings: dict[str, Any]) -> str:
    """Make the whole HTML document; the parameters are those of `as_dict`. The plots are those of the last run."""
    last = found[-1]
    title = "Simulated fleet"
    plots = [
        ("Latency, cumulative", _cdf(found)),
        ("Outcomes over time", _outcomes(last)),
        ("Hits and SLO over time", _ratios(last)),
    ]
    if len(found) > 1:
        plots.append(("SLO attainment against instances", _attainment(found, capacity)))
    figures = "".join(figure(name, plot) for name, plot in plots)
    rows = [[escape(cell) for cell in row(one)] for one in found]
    facts = table(("", ""), [[escape(key), escape(value)] for key, value in _facts(last)])
    text = f"<p><b>{escape(answer(capacity))}</b></p>" if capacity else ""
    data = escape(json.dumps(as_dict(found, capacity, settings), indent=2))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>"
        f'<p class="dim">A prediction of npu-gr simulate, not a measurement.</p>{text}'
        f'{table(_COLUMNS, rows)}<div class="plots">{figures}</div><div class="facts">{facts}</div>'
        f"<h2>JSON</h2><details><summary>all of it</summary><pre>{data}</pre></details></body></html>\n"
    )


def _facts(found: FleetResult) -> list[tuple[str, str]]:
    def counts(values: dict[str, int]) -> str:
        return ", ".join(f"{key} {value}" for key, value in values.items()) or "none"

    return [
        ("ranks counted", f"{found.num_ranks} in {found.counted_s:.1f} virtual seconds"),
        ("outcomes", counts(dict(found.outcomes.most_common()))),
        ("signals", counts(dict(found.verdicts.most_common()))),
        ("routed", counts({str(key): value for key, value in found.how.most_common()})),
        ("pre-infers that no rank used", f"{found.num_wasted} of {found.num_produced}"),
    ]


def _cdf(found: Sequence[FleetResult]) -> str:
    share = np.linspace(0.0, 1.0, 201)
    series = {}
    for one in found[-8:]:
        if one.latencies_s:
            values = np.quantile(np.frombuffer(one.latencies_s), share) * 1e3
            series[f"{one.instances} instances"] = list(zip(values.tolist(), share.tolist(), strict=True))
    return lines(series, Axis("ms in the service", is_log=True), Axis("share answered", high=1.02))


def _times(found: FleetResult) -> list[float]:
    return [place * found.slice_s for place in range(len(found.slices))]


def _outcomes(found: FleetResult) -> str:
    names = [name for name in found.outcomes if any(part[name] for part in found.slices)]
    times = _times(found)
    series = {name: [(t, float(part[name])) for t, part in zip(times, found.slices, strict=True)] for name in names}
    return areas(series, Axis("s after the warm-up"), Axis(f"ranks in {found.slice_s:.3g} s"))


def _ratios(found: FleetResult) -> str:
    names = {"HBM hits": Outcome.HBM_HIT, "joined": Outcome.JOINED, "DRAM hits": Outcome.DRAM_HIT, "in time": "good"}
    times = _times(found)
    series = {}
    for label, name in names.items():
        series[label] = [
            (t, part[name] / max(part.total() - part["good"], 1)) for t, part in zip(times, found.slices, strict=True)
        ]
    return lines(series, Axis("s after the warm-up"), Axis("share of the ranks", high=1.02))


def _attainment(found: Sequence[FleetResult], capacity: Capacity | None) -> str:
    points = sorted((float(one.instances), one.attainment_ratio) for one in found)
    level = None if capacity is None else (f"target {capacity.target_ratio:.1%}", capacity.target_ratio)
    x = Axis("instances", is_log=True)
    return lines({"within the SLO": points}, x, Axis("share of the ranks", high=1.02), level=level, dots=True)
