"""The report as one HTML page that loads nothing: plots and tables of every run, and the whole report as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Any

from npu_gr.core.request import Outcome
from npu_gr.replay.report import BIN_ANSWERS, LATE_S, PERCENTILES, Report
from npu_gr.replay.study import Study, name, row
from npu_gr.replay.svg import Band, areas, axis, cloud, lines
from npu_gr.replay.tally import HITS

STYLE = """
:root { color-scheme: light dark; --line: #8885; --dim: #777; }
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1360px; margin: 24px auto; padding: 0 16px; }
h1 { font-size: 22px; } h2 { font-size: 18px; margin-top: 32px; } h3 { font-size: 14px; margin: 0 0 4px; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(420px, 100%), 1fr)); gap: 20px; }
figure { margin: 0; padding: 12px; border: 1px solid var(--line); border-radius: 8px; }
svg { width: 100%; height: auto; display: block; } svg text { font-size: 11px; fill: currentColor; }
.axis { stroke: currentColor; fill: none; } .grid { stroke: var(--line); stroke-width: .5; }
path.level { stroke: #dc2626; stroke-dasharray: 5 4; } svg text.level { fill: #dc2626; }
.band rect { fill: currentColor; fill-opacity: .1; } .band path { stroke: currentColor; stroke-width: 1.2; fill: none; }
i.band { background: #8885; border: solid currentColor; border-width: 1px 0; }
.legend { min-height: 20px; } .key { margin-right: 14px; white-space: nowrap; }
.key i { display: inline-block; width: 10px; height: 10px; margin-right: 5px; border-radius: 2px; }
table { border-collapse: collapse; margin: 8px 0 16px; } td, th { padding: 3px 10px; text-align: right; }
.facts td { text-align: left; overflow-wrap: anywhere; }
tr { border-bottom: 1px solid var(--line); } td:first-child, th:first-child { text-align: left; }
dt { font-weight: 600; } dd { margin: 0 0 8px; max-width: 80ch; }
.warn { color: #dc2626; font-weight: 600; } .dim { color: var(--dim); } pre { overflow: auto; max-height: 400px; }
"""

TIME = "s since the run began"
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
    "live, reserved, evictable": "bytes that are leased or wait for a rank; that work in the queue will fill; that "
    "give way to others",
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
    if study.ended:
        rate = "none" if study.highest_per_s is None else f"{study.highest_per_s:.3g} ranks/s"
        text += f"<p>Highest rate that keeps the SLO: <b>{rate}</b> ({escape(study.ended)}).</p>"
    return text + f'<div class="plots">{figure("Goodput against offered load", _goodput(study.runs))}</div>'


def _run(run: Report, anchor: str) -> str:
    plots = (
        ("Latency over time", _latency(run)),
        ("Latency, cumulative", _cdf(run)),
        ("Outcomes", _outcomes(run)),
        ("Hit ratios", _hits(run)),
        ("Bytes of the memory tiers", _tiers(run)),
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
    heading = f'<h2 id="{anchor}">{escape(name(run))}</h2>'
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
    every = [point for points in series.values() for point in points]
    x = axis("offered ranks/s", [a for a, _ in every])
    y = axis("ranks/s within the SLO", [b for _, b in every])
    return lines(series, x, y, diagonal=True, dots=True, joined=len(runs) > 1)


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
    y = axis("ms from the due time", [*(ms for _, ms, _ in run.points), *(b.high for b in bands), slo_ms], is_log=True)
    words = f"P50 to P99 of at least {BIN_ANSWERS} answers"
    return cloud(series, _time(run), y, bands=(words, bands), level=(f"SLO {slo_ms:g} ms", slo_ms))


def _cdf(run: Report) -> str:
    x = axis("ms from the due time", [ms for points in run.cdf.values() for ms, _ in points], is_log=True)
    return lines(run.cdf, x, axis("share answered", [1.0]))


def _outcomes(run: Report) -> str:
    series = {
        name: [(part["at_s"], float(part["outcomes"].get(name, 0))) for part in run.slices]
        for name in _outcome_names(run)
    }
    return areas(series, _time(run), f"ranks in {_slice_s([run]):g} s")


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
    return lines(series, _time(run), axis("share of the ranks", [1.0]))


def _tiers(run: Report) -> str:
    if not run.tiers:
        return '<p class="dim">No --admin-url was given, or it shows no npu_gr_kv_bytes at /metrics.</p>'
    names = [key for key in run.tiers[0].bytes if not key.endswith(" free")]
    series = {key: [(tier.taken_at, tier.bytes.get(key, 0.0)) for tier in run.tiers] for key in names}
    values = [value for points in series.values() for _, value in points]
    return lines(series, axis(TIME, [tier.taken_at for tier in run.tiers]), axis("bytes", values))


def _time(run: Report) -> Any:
    return axis(TIME, [part["at_s"] for part in run.slices])


def figure(title: str, plot: str) -> str:
    """A plot (SVG) under its title, as HTML."""
    return f"<figure><h3>{escape(title)}</h3>{plot}</figure>"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table. Cells are HTML already; titles of columns are text."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>" for cells in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
