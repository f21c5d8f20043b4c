"""The sums of a run, in constant memory however long it is. The sums of several clients can be merged."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import numpy.typing as npt

from npu_gr.core.request import Outcome
from npu_gr.replay.digests import digest
from npu_gr.replay.histogram import Latency, Point, Scatter, Slices
from npu_gr.replay.log import SCORED
from npu_gr.replay.quality import ndcg_at
from npu_gr.replay.sample import ReplayedAnswer, Sample

HITS = (Outcome.HBM_HIT, Outcome.JOINED, Outcome.DRAM_HIT)

_KEPT_BITS = 20  # of a float32 score: sign, 8 of exponent, 11 of mantissa; scores that differ below that count as ties


class PooledAuc:
    """AUC over any number of labelled scores, from counts of scores rounded to 11 bits of mantissa."""

    def __init__(self) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros((2, 1 << _KEPT_BITS), np.int64)  # by label, ascending score

    def add(self, scores: npt.NDArray[np.float64], labels: npt.NDArray[np.bool_]) -> None:
        """Count labelled scores: `scores` without NaN, and which of them are positive."""
        bits = (scores.astype("<f4") + np.float32(0)).view("<u4")  # -0.0 becomes 0.0
        ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))  # as unsigned integers in the scores' order
        rounded = np.minimum(ordered.astype(np.int64) + (1 << (31 - _KEPT_BITS)), (1 << 32) - 1)
        np.add.at(self.counts, (labels.astype(np.int64), rounded >> (32 - _KEPT_BITS)), 1)

    def merge(self, other: PooledAuc) -> None:
        """Count all scores of `other` too."""
        self.counts += other.counts

    def value(self) -> float:
        """The AUC; NaN without a positive, or without a negative."""
        negative, positive = self.counts.astype(np.float64)
        pairs = negative.sum() * positive.sum()
        below = np.cumsum(negative) - negative
        return float((positive * (below + negative / 2)).sum() / pairs) if pairs else float("nan")


class Tally:
    """Sums over the samples of a run, from which `report.summarise` makes a report.

    Args:
        slo_s: an answer within it is in time.
        warmup_s: samples that were due before it are counted in `num_warmup` only.
    """

    def __init__(self, slo_s: float, warmup_s: float = 0.0) -> None:
        self.slo_s = slo_s
        self.warmup_s = warmup_s
        self.num_warmup = 0
        self.latencies: defaultdict[str, Latency] = defaultdict(Latency)  # kind, or "rank hbm_hit"
        self.lag = Latency()
        self.stages: defaultdict[str, Latency] = defaultdict(Latency)
        self.slices = Slices()
        self.scatter = Scatter()
        self.num_scored = 0  # requests of the kinds that have scores
        self.num_within_slo = 0  # of these
        self.num_resent = 0
        self.num_bytes = 0  # of bodies
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.model_versions: Counter[str] = Counter()
        self.logged_digests: Counter[str] = Counter()  # "equal" or "different" to the digest in the log
        self.history_tokens = 0
        self.prefix_tokens = 0  # of these, read from cached KV
        self.first_due_at = float("inf")  # these three: seconds after the run began
        self.last_due_at = 0.0
        self.ended_at = 0.0
        self.auc: defaultdict[str, PooledAuc] = defaultdict(PooledAuc)
        self.ndcg: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0])  # sum, count

    def add(self, sample: Sample) -> None:
        """Count a request that is over."""
        if sample.due_at < self.warmup_s:
            self.num_warmup += 1
            return
        self.first_due_at = min(self.first_due_at, sample.due_at)
        self.last_due_at = max(self.last_due_at, sample.due_at)
        self.ended_at = max(self.ended_at, sample.due_at + sample.latency_s)
        self.lag.record(sample.lag_s)
        self.num_resent += sample.was_resent
        self.num_bytes += sample.num_bytes
        kind = sample.record.kind
        if sample.error:
            self.errors[f"{kind} {sample.error}"] += 1
        else:
            self.latencies[kind].record(sample.latency_s)
        if kind in SCORED:
            self._add_scored(sample, sample.answer)

    def _add_scored(self, sample: Sample, answer: ReplayedAnswer | None) -> None:
        part = self.slices.at(sample.due_at)
        self.num_scored += 1
        part.num_due += 1
        outcome = "error" if answer is None else answer["outcome"]
        self.scatter.add(sample.number, Point(sample.due_at, sample.latency_s, outcome))
        part.outcomes[outcome] += 1
        if answer is None:
            return
        is_good = sample.latency_s <= self.slo_s
        self.num_within_slo += is_good
        part.num_good += is_good
        part.latency.record(sample.latency_s)
        self.latencies[f"{sample.record.kind} {outcome}"].record(sample.latency_s)
        self.outcomes[outcome] += 1
        if answer["reason"]:
            self.reasons[answer["reason"]] += 1
        self.model_versions[answer.get("model_version", "")] += 1
        self.history_tokens += answer["history"]["num_tokens"]
        self.prefix_tokens += answer["prefix_tokens"]
        for name, seconds in answer["stages_s"].items():
            self.stages[name].record(seconds)
        logged = sample.record.answer
        if logged is not None and logged.digest:
            same = logged.digest == digest(answer["scores"], answer.get("items", ()))
            self.logged_digests["equal" if same else "different"] += 1
        if sample.record.labels:
            self._add_quality(sample, answer)

    def _add_quality(self, sample: Sample, answer: ReplayedAnswer) -> None:
        for task, truth in sample.record.labels.items():
            if task not in answer["scores"]:
                continue
            served = np.array(answer["scores"][task], np.float64)  # null becomes NaN
            known = np.array([label is not None for label in truth]) & ~np.isnan(served)
            positive = np.array([label == 1 for label in truth])
            self.auc[task].add(served[known], positive[known])
            gain = ndcg_at(10, served, positive)
            if not np.isnan(gain):
                self.ndcg[task][0] += gain
                self.ndcg[task][1] += 1

    def merge(self, other: Tally) -> None:
        """Add all sums of another client."""
        for name in ("num_warmup", "num_scored", "num_within_slo", "num_resent", "num_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.history_tokens += other.history_tokens
        self.prefix_tokens += other.prefix_tokens
        for mine, theirs in ((self.latencies, other.latencies), (self.stages, other.stages)):
            for name, latency in theirs.items():
                mine[name].merge(latency)
        self.lag.merge(other.lag)
        self.slices.merge(other.slices)
        self.scatter.merge(other.scatter)
        for name in ("outcomes", "reasons", "errors", "model_versions", "logged_digests"):
            getattr(self, name).update(getattr(other, name))
        self.first_due_at = min(self.first_due_at, other.first_due_at)
        self.last_due_at = max(self.last_due_at, other.last_due_at)
        self.ended_at = max(self.ended_at, other.ended_at)
        for task, pooled in other.auc.items():
            self.auc[task].merge(pooled)
        for task, (total, num) in other.ndcg.items():
            self.ndcg[task][0] += total
            self.ndcg[task][1] += num

    def __getstate__(self) -> dict[str, object]:
        return {name: dict(value) if isinstance(value, defaultdict) else value for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, object]) -> None:
        fresh = vars(Tally(0.0))
        for name, value in state.items():
            if isinstance(fresh[name], defaultdict):
                fresh[name].update(value)
                value = fresh[name]
            setattr(self, name, value)
