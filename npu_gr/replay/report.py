"""The report of a replay: latency from the due time, goodput, hits, and quality of scores."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table

from npu_gr import __version__
from npu_gr.replay.log import RECORDED, SCORED
from npu_gr.replay.tally import HITS, Latency, Tally

PERCENTILES = (50, 95, 99, 99.9)
LATE_S = 0.005  # above this P99 of the send lag, the load generator was too slow
CDF_POINTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Percentiles in ms of the answered requests of one kind, or of one kind and outcome."""

    name: str  # "rank", or "rank hbm_hit"
    count: int
    ms: dict[str, float]  # "p50" ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All metrics of a run; `as_dict` is for JSON, `render` for a terminal."""

    interrupted: bool  # only requests answered before the interruption count
    duration_s: float
    offered_per_s: float  # due requests with scores, per second
    slo_s: float
    num_ranks: int  # requests of all kinds with scores
    num_within_slo: int
    latencies: list[Latencies]  # per kind, and per kind and outcome
    outcomes: dict[str, int]
    reasons: dict[str, int]
    errors: dict[str, int]  # "rank 504" -> count
    prefix_tokens_ratio: float  # share of the history tokens from cached KV
    stages_p50_ms: dict[str, float]
    lag_ms: dict[str, float]
    auc: dict[str, float]  # by task, pooled over the labelled candidates
    ndcg_at_10: dict[str, float]  # by task, mean over ranks with a positive
    num_labelled: dict[str, int]  # by task, ranks with a positive
    settings: dict[str, Any]
    num_warmup: int = 0  # requests in the warm-up, not counted
    num_resent: int = 0  # deltas whose prefix was no longer cached
    sent_bytes: int = 0  # of bodies
    model_versions: dict[str, int] = field(default_factory=dict)
    # answers "equal" to or "different" from the log's
    logged_digests: dict[str, int] = field(default_factory=dict)
    bad_lines: list[str] = field(default_factory=list)  # reasons of the first ones
    num_bad_lines: int = 0
    cdf: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # kind -> (ms, share)
    slices: list[dict[str, Any]] = field(default_factory=list)  # metrics by time
    # a sample of (due time in s, latency in ms, outcome)
    points: list[tuple[float, float, str]] = field(default_factory=list)

    @property
    def goodput_per_s(self) -> float:
        """Ranks answered within the SLO, per second."""
        return self.num_within_slo / self.duration_s if self.duration_s else 0.0

    @property
    def attainment_ratio(self) -> float:
        """Share of all ranks answered within the SLO; NaN without ranks."""
        return self.num_within_slo / self.num_ranks if self.num_ranks else float("nan")

    @property
    def has_failed(self) -> bool:
        """Whether no request with scores was answered; without these, no request at all."""
        answered = self.outcomes.values() if self.num_ranks else (r.count for r in self.latencies)
        return bool(self.errors) and not sum(answered)

    @property
    def was_late(self) -> bool:
        """Whether the load generator sent late, so that latencies include its delays."""
        return self.lag_ms.get("p99", 0.0) > LATE_S * 1e3

    def hit_ratio(self, outcome: str) -> float:
        """Return the share of the answered ranks with an outcome."""
        total = sum(self.outcomes.values())
        return self.outcomes.get(outcome, 0) / total if total else 0.0

    def latency_ms(self, name: str, percentile: str) -> float:
        """Return a percentile ("p50") of the latencies of a name; NaN if there are none."""
        return next(
            (row.ms[percentile] for row in self.latencies if row.name == name), float("nan")
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the metrics as JSON values."""
        fields = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name != "latencies"
        }
        return {
            **fields,
            "latencies_ms": {row.name: {"count": row.count, **row.ms} for row in self.latencies},
            "goodput_per_s": self.goodput_per_s,
            "slo_attainment_ratio": self.attainment_ratio if self.num_ranks else None,
            "was_late": self.was_late,
            "hit_ratios": {name: self.hit_ratio(name) for name in HITS},
            "environment": environment(self.settings.get("seed")),
        }

    def to_json(self) -> str:
        """Return `as_dict` as JSON; metrics that could not be measured are null."""
        return msgspec.json.format(msgspec.json.encode(self.as_dict()), indent=2).decode()

    def render(self) -> Group:
        """Format tables for a terminal."""
        latency = Table(
            "ms from the due time",
            "count",
            "share",
            *(f"P{p:g}" for p in PERCENTILES),
            title="Latency",
        )
        for row in self.latencies:
            _, _, outcome = row.name.partition(" ")
            of_ranks = f"{self.hit_ratio(outcome):.1%}" if outcome else ""
            latency.add_row(
                row.name, str(row.count), of_ranks, *(f"{value:.2f}" for value in row.ms.values())
            )
        summary = Table(
            show_header=False, title="Replay, interrupted" if self.interrupted else "Replay"
        )
        for name, text in self.facts():
            summary.add_row(name, text)
        return Group(latency, summary)

    def facts(self) -> list[tuple[str, str]]:
        """Return the other metrics as (name, text) pairs."""
        goodput = f"{self.goodput_per_s:.1f} ranks/s within {self.slo_s * 1e3:g} ms"
        share = self.attainment_ratio if self.num_ranks else 0.0
        late = "  THE LOAD GENERATOR WAS LATE" if self.was_late else ""
        found = [
            ("goodput", f"{goodput}, of {self.offered_per_s:.1f} offered"),
            ("SLO attainment", f"{share:.2%} of {self.num_ranks} ranks in {self.duration_s:.1f} s"),
            ("history tokens from cached KV", f"{self.prefix_tokens_ratio:.1%}"),
            ("cache misses, by reason", _listed(self.reasons)),
            ("errors", _listed(self.errors)),
            ("stages, P50 ms", _listed(self.stages_p50_ms)),
            ("requests left late by, ms", _listed(self.lag_ms) + late),
            ("sent", f"{self.sent_bytes / 1e6:.2f} MB of bodies"),
            ("model versions", _listed(self.model_versions)),
        ]
        found += [(f"AUC {task}", f"{value:.4f}") for task, value in self.auc.items()]
        for task, value in self.ndcg_at_10.items():
            found.append((f"NDCG@10 {task}", f"{value:.4f} over {self.num_labelled[task]} ranks"))
        if self.logged_digests:
            found.append(("answers compared with the log", _listed(self.logged_digests)))
        if self.num_resent:
            found.append(("deltas resent as full histories", str(self.num_resent)))
        if self.num_warmup:
            found.append(("warm-up requests, not counted", str(self.num_warmup)))
        if self.num_bad_lines:
            found.append((f"{self.num_bad_lines} bad lines skipped", "\n".join(self.bad_lines)))
        return [
            *found,
            ("settings", _listed({k: v for k, v in self.settings.items() if v is not None})),
        ]


def _listed(values: dict[str, Any]) -> str:
    texts = (
        f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}"
        for key, value in values.items()
    )
    return ", ".join(texts) or "none"


def summarise(
    tally: Tally,
    settings: dict[str, Any],
    interrupted: bool = False,
    bad_lines: Iterable[str] = (),
    num_bad_lines: int = 0,
) -> Report:
    """Make the report of a run.

    Args:
        tally: Sums of the run.
        settings: Settings of the run.
        interrupted: Whether the run was ended early.
        bad_lines: Reasons of the first bad lines of the log.
        num_bad_lines: Number of all bad lines.
    """
    first_at = min(tally.first_due_at, tally.ended_at)
    sending_s = tally.last_due_at - first_at
    names = sorted(tally.latencies, key=lambda name: (_ORDER.index(name.split()[0]), name))
    return Report(
        interrupted=interrupted,
        duration_s=tally.ended_at - first_at,
        offered_per_s=tally.num_scored / sending_s if sending_s > 0 else 0.0,
        slo_s=tally.slo_s,
        num_ranks=tally.num_scored,
        num_within_slo=tally.num_within_slo,
        latencies=[_latencies(name, tally.latencies[name]) for name in names]
        or [_latencies("rank", Latency())],
        outcomes=_sorted(tally.outcomes),
        reasons=dict(tally.reasons),
        errors=_sorted(tally.errors),
        prefix_tokens_ratio=tally.prefix_tokens / tally.history_tokens
        if tally.history_tokens
        else 0.0,
        stages_p50_ms={
            name: latency.percentile_s(50) * 1e3 for name, latency in tally.stages.items()
        },
        lag_ms=_percentiles(tally.lag),
        auc={task: pooled.value() for task, pooled in sorted(tally.auc.items())},
        ndcg_at_10={
            task: tally.ndcg[task][0] / tally.ndcg[task][1] if tally.ndcg[task][1] else float("nan")
            for task in sorted(tally.auc)
        },
        num_labelled={task: int(tally.ndcg[task][1]) for task in sorted(tally.auc)},
        settings=settings,
        num_warmup=tally.num_warmup,
        num_resent=tally.num_resent,
        sent_bytes=tally.num_bytes,
        model_versions=_sorted(tally.model_versions),
        logged_digests=_sorted(tally.logged_digests),
        bad_lines=list(bad_lines),
        num_bad_lines=num_bad_lines,
        cdf={name: _cdf(tally.latencies[name]) for name in names},
        slices=_slices(tally),
        points=[
            (round(p.due_at, 3), round(p.latency_s * 1e3, 3), p.outcome)
            for p in tally.scatter.points()
        ],
    )


# order of kinds in tables
_ORDER = (*SCORED, *(name for name in RECORDED if name not in SCORED))


def environment(seed: int | None) -> dict[str, Any]:
    """Describe the machine and versions of the client, and the seed."""
    return {
        "npu_gr": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "seed": seed,
    }


def _slices(tally: Tally) -> list[dict[str, Any]]:
    width_s = tally.slices.width_s
    return [
        {
            "at_s": index * width_s,
            "offered_per_s": part.num_due / width_s,
            "goodput_per_s": part.num_good / width_s,
            "num_answered": len(part.latency),
            "p50_ms": part.latency.percentile_s(50) * 1e3,
            "p99_ms": part.latency.percentile_s(99) * 1e3,
            "outcomes": _sorted(part.outcomes),
        }
        for index, part in enumerate(tally.slices.slices)
        if part.num_due
    ]


def _cdf(latency: Latency) -> list[tuple[float, float]]:
    points = [(seconds * 1e3, share) for seconds, share in latency.cdf()]
    step = max(1, len(points) // CDF_POINTS)
    tail = [point for point in points if point[1] > 0.99][:: max(1, step // 4)]
    return sorted({*points[::step], *tail, *points[-1:]})


def _latencies(name: str, latency: Latency) -> Latencies:
    return Latencies(name=name, count=len(latency), ms=_percentiles(latency))


def _percentiles(latency: Latency) -> dict[str, float]:
    return {f"p{p:g}": latency.percentile_s(p) * 1e3 for p in PERCENTILES}


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items()))


# ---- several runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Reports of several runs, in their order."""

    runs: list[Report] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the metrics as JSON values."""
        return {"runs": [run.as_dict() for run in self.runs]}

    def to_json(self) -> str:
        """Return `as_dict` as JSON; metrics that could not be measured are null."""
        return msgspec.json.format(msgspec.json.encode(self.as_dict()), indent=2).decode()

    def render(self) -> RenderableType:
        """Format for a terminal: the tables of a single run, or one row per run."""
        if len(self.runs) == 1:
            return self.runs[0].render()
        run_column = Column(COLUMNS[0], no_wrap=True)
        title = f"ranks within {self.runs[0].slo_s * 1e3:g} ms"
        table = Table(run_column, *COLUMNS[1:], box=box.SIMPLE, title=title)
        for run in self.runs:
            table.add_row(*row(run))
        return table


def arrivals(settings: dict[str, Any]) -> str:
    """Describe the arrivals of a run."""
    if settings["closed"] is not None:
        return f"closed, {settings['closed']} in flight"
    if settings["rate"] is not None:
        return f"{settings['arrival']} {settings['rate']:.4g}/s"
    return f"log x {settings['speed']:g}"


COLUMNS = (
    *("run", "offered/s", "goodput/s", "within SLO", "P50 ms", "P99 ms", "hits", "cached tokens"),
    "send-lag P99 ms",
)


def row(run: Report) -> list[str]:
    """Return the cells of a run in the table with `COLUMNS`."""
    return [
        arrivals(run.settings) + (", interrupted" if run.interrupted else ""),
        f"{run.offered_per_s:.1f}",
        f"{run.goodput_per_s:.1f}",
        f"{run.attainment_ratio:.2%}",
        f"{run.latency_ms('rank', 'p50'):.2f}",
        f"{run.latency_ms('rank', 'p99'):.2f}",
        f"{sum(run.hit_ratio(hit) for hit in HITS):.1%}",
        f"{run.prefix_tokens_ratio:.1%}",
        f"{run.lag_ms['p99']:.2f}" + (" LATE" if run.was_late else ""),
    ]
