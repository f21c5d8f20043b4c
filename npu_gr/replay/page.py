"""Plots as SVG text within a page, by matplotlib: lines, points under a band, and stacked areas.

Text stays text, nothing is loaded, and the same figures give the same bytes. Without the extra `plot` there is a
sentence in a plot's place, so that a report always has its tables.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

from npu_gr.core.request import Outcome
from npu_gr.replay.report import BIN_ANSWERS, LATE_S, PERCENTILES, Report, Study, arrivals, row
from npu_gr.replay.tally import HITS

Points = Sequence[tuple[float, float]]
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4b5563")
SIZE_IN = (9.0, 4.4)
WIDE_IN = (17.0, 5.6)  # of a plot that has a row of the page for itself
LACKS = "<p class=\"dim\">Plots need <code>pip install 'npu_gr[plot]'</code>.</p>"
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "npu_gr",  # ids of shapes follow from what they draw
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e6ea",
    "legend.frameon": False,
    "text.parse_math": False,
}


class Axis(NamedTuple):
    """The horizontal or vertical axis of a plot."""

    label: str
    is_log: bool = False
    high: float | None = None  # where it ends; None = behind the last value


class Band(NamedTuple):
    """A range of values over a stretch of the x axis."""

    start: float
    end: float
    low: float
    high: float


def lines(
    series: Mapping[str, Points],
    x: Axis,
    y: Axis,
    *,
    level: tuple[str, float] | None = None,
    diagonal: bool = False,
    dots: bool = False,
    joined: bool = True,
    is_wide: bool = False,
) -> str:
    """Plot lines, or clouds of points.

    Args:
        series: name -> points (x, y) in order; a point that is not finite is left out.
        x, y: the axes.
        level: text and y of a dashed horizontal line.
        diagonal: draw a dashed line y = x.
        dots: mark the points of lines.
        joined: a series is a line; else a cloud of points, and one of a single point is a mark. A line that is 0 from
            end to end is only in the legend: several of them would hide each other.
        is_wide: it has a row of the page for itself.
    """

    def draw(axes: Any) -> None:
        if diagonal:
            axes.axline((0, 0), slope=1, color="#dc2626", ls="--", lw=1, label="all offered")
        for colour, (name, points) in _coloured(series):
            finite = [(a, b) for a, b in points if math.isfinite(a) and math.isfinite(b)]
            across, up = zip(*finite, strict=True) if finite else ((), ())
            if joined and len(points) > 1 and not any(up):
                axes.plot([], [], color=colour, label=f"{name}: 0")
            elif joined or len(finite) == 1:
                mark = "o" if dots or len(finite) == 1 else ""
                axes.plot(across, up, color=colour, lw=1.8, marker=mark, label=name, zorder=3)
            else:
                axes.scatter(across, up, s=14, color=colour, alpha=0.5, lw=0, label=name)
        _level(axes, level)

    return _svg(draw, x, y, WIDE_IN if is_wide else SIZE_IN)


def cloud(
    series: Mapping[str, Points], x: Axis, y: Axis, *, bands: tuple[str, Sequence[Band]], level: tuple[str, float]
) -> str:
    """Plot many points, and with them a range of values for each stretch of the x axis.

    Args:
        series: name -> points (x, y) in any order.
        x, y: the axes.
        bands: what the ranges are, and the ranges.
        level: text and y of a dashed horizontal line.
    """

    def draw(axes: Any) -> None:
        for colour, (name, points) in _coloured(series):
            across, up = zip(*points, strict=True) if points else ((), ())
            axes.scatter(across, up, s=7, color=colour, alpha=0.5, lw=0, label=name)
        for place, band in enumerate(bands[1]):
            axes.fill_between([band.start, band.end], band.low, band.high, color="#111", alpha=0.1, lw=0)
            axes.hlines(
                [band.low, band.high], band.start, band.end, color="#111", lw=1.2, label=None if place else bands[0]
            )
        _level(axes, level)

    return _svg(draw, x, y, WIDE_IN)


def areas(series: Mapping[str, Points], x: Axis, y: Axis) -> str:
    """Plot areas that are stacked on each other; all series have the same x, and the other axis begins at 0."""

    def draw(axes: Any) -> None:
        names = list(series)
        if names and series[names[0]]:
            across = [a for a, _ in series[names[0]]]
            heights = [[b for _, b in series[name]] for name in names]
            colours = [colour for colour, _ in _coloured(series)]
            axes.stackplot(across, heights, labels=names, colors=colours, alpha=0.85, lw=0)

    return _svg(draw, x, y, SIZE_IN)


def _coloured(series: Mapping[str, Points]) -> list[tuple[str, tuple[str, Points]]]:
    return [(COLOURS[place % len(COLOURS)], one) for place, one in enumerate(series.items())]


def _level(axes: Any, level: tuple[str, float] | None) -> None:
    if level is not None:
        axes.axhline(level[1], color="#dc2626", ls="--", lw=1, label=level[0])


def _svg(draw: Callable[[Any], None], x: Axis, y: Axis, size_in: tuple[float, float]) -> str:
    try:
        import matplotlib as mpl
        from matplotlib.collections import PathCollection
        from matplotlib.figure import Figure
    except ImportError:
        return LACKS
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size_in, layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        (x_low, y_low), (x_high, y_high) = axes.dataLim.get_points()
        _scale(axes.xaxis, axes.set_xscale, axes.set_xlim, (x_low, x_high), x)
        _scale(axes.yaxis, axes.set_yscale, axes.set_ylim, (y_low, y_high), y)
        handles, names = axes.get_legend_handles_labels()
        if handles:
            legend = figure.legend(handles, names, loc="outside upper left", ncols=5, handlelength=1.2)
            for handle in legend.legend_handles:
                if isinstance(handle, PathCollection):  # points of the plot are smaller
                    handle.set_sizes([36.0])
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :].replace("<svg ", '<svg role="img" ', 1)


def _scale(
    axis: Any, set_scale: Callable[[str], Any], set_limits: Callable[[float, float], Any], drawn: Any, wanted: Axis
) -> None:
    """Begin a linear axis at 0, or below, and write round numbers beside either."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator

    axis.set_label_text(wanted.label)
    low, high = (float(value) if math.isfinite(value) else 0.0 for value in drawn)
    if wanted.is_log:
        set_scale("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(LogLocator(subs=()))
        return
    set_limits(min(0.0, low), wanted.high or (high * 1.05 if high > 0 else 1.0))
    if high >= 1e4:
        axis.set_major_formatter(EngFormatter(sep=""))


# ---- the page

STYLE = """
:root { color-scheme: light; --line: #d5d9e0; --dim: #6b7280; }
body { font: 14px/1.45 system-ui, sans-serif; color: #16191f; background: #fff; max-width: 1480px; margin: 24px auto;
  padding: 0 16px; }
h1 { font-size: 22px; } h2 { font-size: 18px; margin-top: 32px; } h3 { font-size: 14px; margin: 0 0 4px; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(620px, 100%), 1fr)); gap: 20px; }
figure { margin: 0; padding: 12px; border: 1px solid var(--line); border-radius: 8px; }
figure:first-child { grid-column: 1 / -1; }
svg { width: 100%; height: auto; display: block; max-height: 560px; }
table { border-collapse: collapse; margin: 8px 0 16px; } td, th { padding: 3px 10px; text-align: right; }
.facts td { text-align: left; overflow-wrap: anywhere; }
tr { border-bottom: 1px solid var(--line); } td:first-child, th:first-child { text-align: left; }
dt { font-weight: 600; } dd { margin: 0 0 8px; max-width: 80ch; }
.warn { color: #dc2626; font-weight: 600; } .dim { color: var(--dim); } pre { overflow: auto; max-height: 400px; }
"""

TIME = Axis("s since the run began")
_RUN_COLUMNS = (
    *("run", "offered/s", "goodput/s", "within SLO", "P50 ms", "P99 ms", "hits", "cached tokens"),
    "send-lag P99 ms",
)
_WORDS = {
    "offered, goodput": "ranks that were sent a second; those of them that were answered within the objective (SLO)",
    "due time": "when a request should leave, by the log or the rate. Latencies count from it, so a load generator "
    "that falls behind hides nothing",
    "send-lag": f"how late requests left. Over {LATE_S * 1e3:g} ms at P99 the load generator was the limit, not the "
    "service",
    "hits": "ranks that found the keys and values (KV) of the user's history: in device memory (hbm_hit), in host "
    "memory (dram_hit), or while they were being computed (joined)",
    "miss_full, degraded": "ranks that computed all of the history; that read only its newest part, to be in time",
    "cached tokens": "share of all history tokens that were read from KV instead of being computed",
}


def page(study: Study, title: str) -> str:
    """The whole HTML document of a study."""
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    parts = [head, f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>", _summary(study)]
    for place, run in enumerate(study.runs, 1):
        parts.append(_run(run, f"run-{place}"))
    words = "".join(f"<dt>{word}</dt><dd>{meaning}</dd>" for word, meaning in _WORDS.items())
    parts.append(f"<h2>Words</h2><dl>{words}</dl>")
    parts.append(f"<h2>JSON</h2><details><summary>all of it</summary><pre>{escape(study.to_json())}</pre></details>")
    return "".join(parts) + "</body></html>\n"


def _summary(study: Study) -> str:
    rows = [
        [f'<a href="#run-{i}">{escape(cells[0])}</a>', *cells[1:]] for i, cells in enumerate(map(row, study.runs), 1)
    ]
    text = table(_RUN_COLUMNS, rows)
    return text + f'<div class="plots">{figure("Goodput against offered load", _goodput(study.runs))}</div>'


def _run(run: Report, anchor: str) -> str:
    plots = (
        ("Latency over time", _latency(run)),
        ("Latency, cumulative", _cdf(run)),
        ("Outcomes", _outcomes(run)),
        ("Hit ratios", _hits(run)),
    )
    figures = "".join(figure(title, plot) for title, plot in plots)
    warning = (
        '<p class="warn">The load generator was late: these latencies are partly its own.</p>' if run.was_late else ""
    )
    cut = '<p class="warn">Interrupted: only what was answered before counts.</p>' if run.interrupted else ""
    columns = ("ms from the due time", "count", *(f"P{p:g}" for p in PERCENTILES))
    latencies = table(
        columns, [[escape(r.name), str(r.count), *(f"{v:.2f}" for v in r.ms.values())] for r in run.latencies]
    )
    facts = table(("", ""), [[escape(key), escape(value)] for key, value in _facts(run)])
    heading = f'<h2 id="{anchor}">{escape(arrivals(run.settings))}</h2>'
    return f'{heading}{cut}{warning}<div class="plots">{figures}</div>{latencies}<div class="facts">{facts}</div>'


def _facts(run: Report) -> list[tuple[str, str]]:
    def counts(values: dict[str, Any]) -> str:
        return ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()) or "none"

    facts = [
        ("goodput", f"{run.goodput_per_s:.2f} ranks/s within {run.slo_s * 1e3:g} ms"),
        ("SLO attainment", f"{run.attainment_ratio:.3%} of {run.num_ranks} ranks in {run.duration_s:.1f} s"),
        ("history tokens from cached KV", f"{run.prefix_tokens_ratio:.1%}"),
        ("not a hit because", counts(run.reasons)),
        ("errors", counts(run.errors)),
        ("stages, P50 ms", counts(run.stages_p50_ms)),
        ("send-lag, ms", counts(run.lag_ms)),
        ("sent", f"{run.sent_bytes / 1e6:.2f} MB of bodies"),
        ("model versions", counts(run.model_versions)),
    ]
    facts += [(f"AUC {task}", f"{value:.4f}") for task, value in run.auc.items()]
    facts += [(f"NDCG@10 {task}", f"{value:.4f}") for task, value in run.ndcg_at_10.items()]
    if run.logged_digests:
        facts.append(("answers against the log", counts(run.logged_digests)))
    if run.num_bad_lines:
        facts.append((f"{run.num_bad_lines} bad lines skipped", "; ".join(run.bad_lines)))
    facts.append(("settings", counts({k: v for k, v in run.settings.items() if v is not None})))
    return facts


def _goodput(runs: Sequence[Report]) -> str:
    of_runs = sorted((run.offered_per_s, run.goodput_per_s) for run in runs)
    series = {"runs" if len(runs) > 1 else "the run": of_runs}
    if len(runs) == 1:
        slices = [(part["offered_per_s"], part["goodput_per_s"]) for part in runs[0].slices]
        series = {f"slices of {_slice_s(runs):g} s": slices, **series}
    x, y = Axis("offered ranks/s"), Axis("ranks/s within the SLO")
    return lines(series, x, y, diagonal=True, dots=True, joined=len(runs) > 1, is_wide=True)


def _slice_s(runs: Sequence[Report]) -> float:
    starts = [part["at_s"] for run in runs for part in run.slices]
    return min((b - a for a, b in pairwise(starts)), default=0.0)


def _latency(run: Report) -> str:
    """Every request of the sample as a point; P50 and P99 only of stretches with enough answers."""
    series = {name: [(at_s, ms) for at_s, ms, outcome in run.points if outcome == name] for name in _outcome_names(run)}
    bands = [
        Band(part["from_s"], part["to_s"], part["p50_ms"], part["p99_ms"])
        for part in run.bins
        if part["num_answered"] >= BIN_ANSWERS
    ]
    slo_ms = run.slo_s * 1e3
    words = f"P50 to P99 of at least {BIN_ANSWERS} answers"
    y = Axis("ms from the due time", is_log=True)
    return cloud(series, TIME, y, bands=(words, bands), level=(f"SLO {slo_ms:g} ms", slo_ms))


def _cdf(run: Report) -> str:
    return lines(run.cdf, Axis("ms from the due time", is_log=True), Axis("share answered", high=1.02))


def _outcomes(run: Report) -> str:
    series = {
        name: [(part["at_s"], float(part["outcomes"].get(name, 0))) for part in run.slices]
        for name in _outcome_names(run)
    }
    return areas(series, TIME, Axis(f"ranks in {_slice_s([run]):g} s"))


def _outcome_names(run: Report) -> list[str]:
    """The outcomes of a run in a fixed order, so that each has one colour in all plots of it."""
    found = {outcome for part in run.slices for outcome in part["outcomes"]}
    known = (*Outcome, "error")
    return [str(name) for name in (*known, *sorted(found.difference(known))) if name in found]


def _hits(run: Report) -> str:
    series = {}
    for hit in HITS:
        series[str(hit)] = [
            ((part["from_s"] + part["to_s"]) / 2, part["outcomes"].get(hit, 0) / sum(part["outcomes"].values()))
            for part in run.bins
        ]
    return lines(series, TIME, Axis("share of the ranks", high=1.02))


def figure(title: str, plot: str) -> str:
    """A plot (SVG) under its title, as HTML."""
    return f"<figure><h3>{escape(title)}</h3>{plot}</figure>"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table. Cells are HTML already; titles of columns are text."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>" for cells in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
