"""The report as one HTML page: tables, and plots of matplotlib as inline SVG.

Plots keep text as text, the page loads no other files, and equal metrics give equal bytes. Without
the extra `plot` a sentence replaces each plot.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from npu_gr.core.request import Outcome
from npu_gr.replay.report import COLUMNS, LATE_S, PERCENTILES, Report, Study, arrivals, row

COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4b5563")
SLICE_ANSWERS = 100  # minimum for the P50 and P99 of a time slice
LACKS = "<p class=\"dim\">Plots need <code>pip install 'npu_gr[plot]'</code>.</p>"
_WIDE_IN = (17.0, 5.6)  # inches of a full-width plot
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "npu_gr",  # deterministic ids of shapes
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e6ea",
    "legend.frameon": False,
    "legend.markerscale": 2.0,
    "text.parse_math": False,
}


def svg(
    draw: Callable[[Any], None],
    x: str,
    y: str,
    *,
    log: str = "",
    size_in: tuple[float, float] = (9.0, 4.4),
) -> str:
    """Make a plot.

    Args:
        draw: Function that draws on a matplotlib `Axes`.
        x, y: Labels of the axes.
        log: The logarithmic axis: "x", "y" or "". A linear axis begins at 0.
        size_in: Width and height in inches.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, LogLocator
    except ImportError:
        return LACKS
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size_in, layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set(xlabel=x, ylabel=y, **({f"{log}scale": "log"} if log else {}))
        for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
            if name == log:
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axis.set_minor_locator(LogLocator(subs=()))
            else:
                axes.set(**{f"{name}lim": (0, None)})
        handles, names = axes.get_legend_handles_labels()
        if handles:
            figure.legend(handles, names, loc="outside upper left", ncols=5, handlelength=2.4)
        out = io.StringIO()
        figure.savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    text = out.getvalue()
    return text[text.index("<svg") :].replace("<svg ", '<svg role="img" ', 1)


# ---- the page

STYLE = """
:root { color-scheme: light; --line: #d5d9e0; --dim: #6b7280; }
body { font: 14px/1.45 system-ui, sans-serif; color: #16191f; background: #fff;
  max-width: 1480px; margin: 24px auto; padding: 0 16px; }
h1 { font-size: 22px; } h2 { font-size: 18px; margin-top: 32px; }
h3 { font-size: 14px; margin: 0 0 4px; }
.plots { display: grid; gap: 20px;
  grid-template-columns: repeat(auto-fill, minmax(min(540px, 100%), 1fr)); }
figure { margin: 0; padding: 12px; border: 1px solid var(--line); border-radius: 8px;
  min-width: 0; overflow-x: auto; }
figure:first-child { grid-column: 1 / -1; }
svg { width: 100%; min-width: 480px; height: auto; display: block; max-height: 560px; }
h1 + figure svg, figure:first-child svg { min-width: 800px; }
table { border-collapse: collapse; margin: 8px 0 16px; display: block; overflow-x: auto; }
td, th { padding: 3px 10px; text-align: right; }
.facts td { text-align: left; overflow-wrap: anywhere; }
tr { border-bottom: 1px solid var(--line); } td:first-child, th:first-child { text-align: left; }
dt { font-weight: 600; } dd { margin: 0 0 8px; max-width: 80ch; }
.warn { color: #dc2626; font-weight: 600; } .dim { color: var(--dim); }
pre { overflow: auto; max-height: 400px; }
"""

_TIME = "s since the run began"
_LATENCY = "ms from the due time"
_WORDS = {
    "offered, goodput": "ranks sent per second; those answered within the objective (SLO)",
    "due time": "when a request should be sent, by the log or the rate. Latencies count from it, "
    "so that delays of the load generator are included",
    "requests left late by": f"how late the load generator sent. If the P99 exceeds "
    f"{LATE_S * 1e3:g} ms, the load generator was the bottleneck, not the service",
    "hits": "ranks that reused the keys and values (KV) of the user's history: from device "
    "memory (hbm_hit), from host memory (dram_hit), or from a running prefill (joined)",
    "miss_full, degraded": "ranks that computed the full history; ranks that used only its newest "
    "part to meet the deadline",
    "cached tokens": "share of the history tokens that were read from KV instead of computed",
}


def page(study: Study, title: str, first: str = "") -> str:
    """Write the HTML document of a study; `first` is a figure that stands before its tables."""
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>"
    )
    parts = [head, f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"]
    parts += [first, _summary(study)]
    for place, run in enumerate(study.runs, 1):
        parts.append(_run(run, f"run-{place}"))
    words = "".join(f"<dt>{word}</dt><dd>{meaning}</dd>" for word, meaning in _WORDS.items())
    parts.append(f"<h2>Words</h2><dl>{words}</dl>")
    parts.append(
        "<h2>JSON</h2><details><summary>all of "
        f"it</summary><pre>{escape(study.to_json())}</pre></details>"
    )
    return "".join(parts) + "</body></html>\n"


def _summary(study: Study) -> str:
    rows = [
        [f'<a href="#run-{i}">{escape(cells[0])}</a>', *cells[1:]]
        for i, cells in enumerate(map(row, study.runs), 1)
    ]
    text = table(COLUMNS, rows)
    return (
        text
        + f'<div class="plots">{figure("Goodput against offered load", _goodput(study.runs))}</div>'
    )


def _run(run: Report, anchor: str) -> str:
    plots = (
        ("Latency over time", _latency(run)),
        ("Latency, cumulative", _cdf(run)),
        ("Outcomes", _outcomes(run)),
    )
    figures = "".join(figure(title, plot) for title, plot in plots)
    warning = (
        '<p class="warn">The load generator was late, so the latencies include its delays.</p>'
        if run.was_late
        else ""
    )
    cut = (
        '<p class="warn">Interrupted: only requests answered before count.</p>'
        if run.interrupted
        else ""
    )
    columns = ("ms from the due time", "count", *(f"P{p:g}" for p in PERCENTILES))
    latencies = table(
        columns,
        [
            [escape(r.name), str(r.count), *(f"{v:.2f}" for v in r.ms.values())]
            for r in run.latencies
        ],
    )
    facts = table(("", ""), [[escape(key), escape(value)] for key, value in run.facts()])
    heading = f'<h2 id="{anchor}">{escape(arrivals(run.settings))}</h2>'
    return (
        f'{heading}{cut}{warning}<div class="plots">{figures}</div>{latencies}<div '
        f'class="facts">{facts}</div>'
    )


def _goodput(runs: Sequence[Report]) -> str:
    def draw(axes: Any) -> None:
        axes.axline((0, 0), slope=1, color="#dc2626", ls="--", lw=1, label="all offered")
        points = sorted((run.offered_per_s, run.goodput_per_s) for run in runs)
        if len(runs) == 1:
            slices = runs[0].slices
            of_slices = [
                [part[name] for part in slices] for name in ("offered_per_s", "goodput_per_s")
            ]
            axes.scatter(
                *of_slices, s=14, color=COLOURS[1], alpha=0.5, lw=0, label="slices of its time"
            )
        name = "runs" if len(runs) > 1 else "the run"
        axes.plot(
            *zip(*points, strict=True), color=COLOURS[0], lw=1.8, marker="o", label=name, zorder=3
        )

    return svg(draw, "offered ranks/s", "ranks/s within the SLO", size_in=_WIDE_IN)


def _latency(run: Report) -> str:
    """Plot a sample of the requests, and P50 and P99 of slices with enough answers."""

    def draw(axes: Any) -> None:
        for colour, name in _outcomes_of(run):
            points = [(at_s, ms) for at_s, ms, outcome in run.points if outcome == name]
            across, up = [at_s for at_s, _ in points], [ms for _, ms in points]
            axes.scatter(across, up, s=7, color=colour, alpha=0.5, lw=0, label=name)
        enough = [part for part in run.slices if part["num_answered"] >= SLICE_ANSWERS]
        if enough:
            across = [part["at_s"] for part in enough]
            low, high = ([part[name] for part in enough] for name in ("p50_ms", "p99_ms"))
            words = f"P50 to P99 of at least {SLICE_ANSWERS} answers"
            axes.fill_between(across, low, high, color="#111", alpha=0.1, lw=0)
            axes.plot(across, low, color="#111", lw=1.2, label=words)
            axes.plot(across, high, color="#111", lw=1.2)
        slo_ms = run.slo_s * 1e3
        axes.axhline(slo_ms, color="#dc2626", ls="--", lw=1, label=f"SLO {slo_ms:g} ms")

    return svg(draw, _TIME, _LATENCY, log="y", size_in=_WIDE_IN)


def _cdf(run: Report) -> str:
    def draw(axes: Any) -> None:
        for place, (name, points) in enumerate(run.cdf.items()):
            colour = COLOURS[place % len(COLOURS)]
            axes.plot(*zip(*points, strict=True), color=colour, lw=1.8, label=name)

    return svg(draw, _LATENCY, "share answered", log="x")


def _outcomes(run: Report) -> str:
    def draw(axes: Any) -> None:
        colours, names = zip(*found, strict=True) if (found := _outcomes_of(run)) else ((), ())
        across = [part["at_s"] for part in run.slices]
        heights = [[part["outcomes"].get(name, 0) for part in run.slices] for name in names]
        if heights:
            axes.stackplot(across, heights, labels=names, colors=colours, alpha=0.85, lw=0)

    return svg(draw, _TIME, "ranks in a slice")


def _outcomes_of(run: Report) -> list[tuple[str, str]]:
    """Return (colour, outcome) pairs in a fixed order, the same in all plots of a run."""
    found = {outcome for part in run.slices for outcome in part["outcomes"]}
    known = (*Outcome, "error")
    names = [str(name) for name in (*known, *sorted(found.difference(known))) if name in found]
    return [(COLOURS[place % len(COLOURS)], name) for place, name in enumerate(names)]


def figure(title: str, plot: str) -> str:
    """Return the HTML of a plot (SVG) with a title."""
    return f"<figure><h3>{escape(title)}</h3>{plot}</figure>"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table. Cells are HTML; titles of columns are text and get escaped."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>" for cells in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
