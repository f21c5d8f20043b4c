"""What a replay measured: latency from the due time, goodput, hits, and the quality of the served scores."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from rich.console import Group
from rich.table import Table

from npu_gr import __version__
from npu_gr.replay.player import Answer, Sample
from npu_gr.replay.quality import auc, ndcg_at
from npu_gr.request import Outcome

PERCENTILES = (50, 95, 99, 99.9)
HITS = (Outcome.HBM_HIT, Outcome.JOINED, Outcome.DRAM_HIT)
LATE_S = 0.005  # a p99 send-lag over this says that the generator, not the service, was slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Of the answered requests of one kind, in ms."""

    name: str
    count: int
    ms: dict[str, float]  # "p50" ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything as plain values; `as_dict` for JSON, `render` for people."""

    interrupted: bool  # then only what was answered before counts
    duration_s: float
    slo_s: float
    num_ranks: int
    num_within_slo: int
    latencies: list[Latencies]  # all ranks, ranks by outcome, signals, events
    outcomes: dict[str, int]
    reasons: dict[str, int]
    errors: dict[str, int]  # "rank 504": how often
    prefix_tokens_ratio: float  # of the ranks' history tokens, how many came from cached KV
    stages_p50_ms: dict[str, float]
    lag_ms: dict[str, float]
    auc: dict[str, float]  # by task, pooled over the labelled candidates
    ndcg_at_10: dict[str, float]  # by task, mean over ranks with a positive
    num_labelled: dict[str, int]  # by task, ranks with a positive
    settings: dict[str, Any]

    @property
    def goodput_per_s(self) -> float:
        """Ranks answered within the SLO, a second."""
        return self.num_within_slo / self.duration_s if self.duration_s else 0.0

    @property
    def was_late(self) -> bool:
        """Whether the generator could not keep its own times."""
        return self.lag_ms.get("p99", 0.0) > LATE_S * 1e3

    def hit_ratio(self, outcome: str) -> float:
        """Share of the answered ranks with that outcome."""
        total = sum(self.outcomes.values())
        return self.outcomes.get(outcome, 0) / total if total else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "latencies"}
        return {
            **fields,
            "latencies_ms": {row.name: {"count": row.count, **row.ms} for row in self.latencies},
            "goodput_per_s": self.goodput_per_s,
            "slo_attainment_ratio": self.num_within_slo / self.num_ranks if self.num_ranks else None,
            "hit_ratios": {name: self.hit_ratio(name) for name in HITS},
            "environment": {
                "npu_gr": __version__,
                "python": platform.python_version(),
                "machine": platform.machine(),
                "cpus": os.cpu_count(),
                "seed": self.settings.get("seed"),
            },
        }

    def to_json(self) -> str:
        """`as_dict` as text; what could not be measured is null."""
        return msgspec.json.format(msgspec.json.encode(self.as_dict()), indent=2).decode()

    def render(self) -> Group:
        """As tables."""
        share = self.num_within_slo / self.num_ranks if self.num_ranks else 0.0
        latency = Table("ms from the due time", "count", "share", *(f"P{p:g}" for p in PERCENTILES), title="Latency")
        for row in self.latencies:
            of_ranks = f"{self.hit_ratio(row.name):.1%}" if row.name in self.outcomes else ""
            latency.add_row(row.name, str(row.count), of_ranks, *(f"{value:.2f}" for value in row.ms.values()))
        summary = Table(show_header=False, title="Replay, interrupted" if self.interrupted else "Replay")
        summary.add_row("goodput", f"{self.goodput_per_s:.1f} ranks/s within {self.slo_s * 1e3:g} ms")
        summary.add_row("SLO attainment", f"{share:.2%} of {self.num_ranks} ranks in {self.duration_s:.1f} s")
        summary.add_row("history tokens from cached KV", f"{self.prefix_tokens_ratio:.1%}")
        for name, counts in (("not a hit because", self.reasons), ("errors", self.errors)):
            summary.add_row(name, ", ".join(f"{key} {count}" for key, count in counts.items()) or "none")
        summary.add_row("stages, P50 ms", ", ".join(f"{k} {v:.2f}" for k, v in self.stages_p50_ms.items()))
        late = "  THE GENERATOR WAS LATE" if self.was_late else ""
        summary.add_row("send-lag ms", ", ".join(f"{k} {v:.2f}" for k, v in self.lag_ms.items()) + late)
        for task, value in self.auc.items():
            summary.add_row(f"AUC {task}", f"{value:.4f}")
        for task, value in self.ndcg_at_10.items():
            summary.add_row(f"NDCG@10 {task}", f"{value:.4f} over {self.num_labelled[task]} ranks")
        return Group(latency, summary)


def report(samples: Sequence[Sample], slo_s: float, settings: dict[str, Any], interrupted: bool = False) -> Report:
    """Sum up a run."""
    ranks = [s for s in samples if s.record.kind == "rank"]
    answered = [(s, s.answer) for s in ranks if s.answer is not None]
    outcomes = Counter(answer["outcome"] for _, answer in answered)
    rows = [_latencies("rank", [s for s, _ in answered])]
    rows += [_latencies(name, [s for s, a in answered if a["outcome"] == name]) for name in sorted(outcomes)]
    for kind in ("signal", "events"):
        done = [s for s in samples if s.record.kind == kind and not s.error]
        if done:
            rows.append(_latencies(kind, done))
    errors = Counter(f"{s.record.kind} {s.error}" for s in samples if s.error)
    history = sum(answer["history"]["num_tokens"] for _, answer in answered)
    stages: dict[str, list[float]] = {}
    for _, answer in answered:
        for name, value in answer["stages_s"].items():
            stages.setdefault(name, []).append(value)
    by_task = _quality(answered)
    ends = [s.due_s + s.latency_s for s in samples]
    return Report(
        interrupted=interrupted,
        duration_s=max(ends, default=0.0) - min((s.due_s for s in samples), default=0.0),
        slo_s=slo_s,
        num_ranks=len(ranks),
        num_within_slo=sum(s.latency_s <= slo_s for s, _ in answered),
        latencies=rows,
        outcomes=dict(sorted(outcomes.items())),
        reasons=dict(Counter(answer["reason"] for _, answer in answered if answer["reason"])),
        errors=dict(sorted(errors.items())),
        prefix_tokens_ratio=sum(answer["prefix_tokens"] for _, answer in answered) / history if history else 0.0,
        stages_p50_ms={name: float(np.median(values)) * 1e3 for name, values in stages.items()},
        lag_ms=_percentiles([s.lag_s for s in samples]),
        auc={task: value for task, (value, _, _) in by_task.items()},
        ndcg_at_10={task: value for task, (_, value, _) in by_task.items()},
        num_labelled={task: count for task, (_, _, count) in by_task.items()},
        settings=settings,
    )


def _quality(answered: Sequence[tuple[Sample, Answer]]) -> dict[str, tuple[float, float, int]]:
    """By task: pooled AUC over labelled candidates, mean NDCG@10 of whole lists, lists with a positive."""
    found = {}
    for task in sorted({task for s, _ in answered for task in s.record.labels}):
        scores, labels, gains = [], [], []
        for s, answer in answered:
            if task not in s.record.labels or task not in answer["scores"]:
                continue
            served = np.array(answer["scores"][task], np.float64)  # null becomes NaN
            truth = s.record.labels[task]
            known = np.array([value is not None for value in truth]) & ~np.isnan(served)
            scores.append(served[known])
            labels.append(np.array([value == 1 for value in truth])[known])
            gain = ndcg_at(10, np.nan_to_num(served, nan=-np.inf), np.array([value == 1 for value in truth]))
            if not np.isnan(gain):
                gains.append(gain)
        if scores:
            mean = float(np.mean(gains)) if gains else float("nan")
            found[task] = (auc(np.concatenate(scores), np.concatenate(labels)), mean, len(gains))
    return found


def _latencies(name: str, samples: Sequence[Sample]) -> Latencies:
    return Latencies(name=name, count=len(samples), ms=_percentiles([s.latency_s for s in samples]))


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {f"p{p:g}": float("nan") for p in PERCENTILES}
    values = np.percentile(seconds, PERCENTILES) * 1e3
    return {f"p{p:g}": float(value) for p, value in zip(PERCENTILES, values, strict=True)}
