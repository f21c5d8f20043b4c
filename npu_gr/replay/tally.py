"""Accumulate the metrics of a run in constant memory.

Latencies are HDR histograms of the run and of time slices, and a sample of points. Quality metrics
are exact, and average over all orders of tied scores, so that constant scores get the metric of a
random order (McSherry and Najork, ECIR 2008). NaN, the score of an unknown item, ranks last.
"""

from __future__ import annotations

import heapq
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import nan
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
from hdrh.histogram import HdrHistogram

from npu_gr.core.request import Outcome
from npu_gr.replay.log import SCORED, digest
from npu_gr.replay.requests import ReplayedAnswer, Sample

MAX_S = 3600.0
MAX_SLICES = 60  # so that each has enough requests for percentiles
MAX_POINTS = 1000

_UNITS_PER_S = 1e6  # microseconds


class Latency:
    """A histogram of seconds.

    Percentiles have `digits` significant digits. Values over an hour count as an hour.
    """

    def __init__(self, digits: int = 3) -> None:
        self._counts: Any = HdrHistogram(1, int(MAX_S * _UNITS_PER_S), digits)

    def __len__(self) -> int:
        return int(self._counts.get_total_count())

    def record(self, seconds: float) -> None:
        """Add a value."""
        self._counts.record_value(max(1, round(min(seconds, MAX_S) * _UNITS_PER_S)))

    def merge(self, other: Latency) -> None:
        """Add all values of another histogram."""
        self._counts.add(other._counts)

    def percentile_s(self, percent: float) -> float:
        """Return a percentile (0 to 100) in seconds; NaN without values."""
        return (
            float(self._counts.get_value_at_percentile(percent)) / _UNITS_PER_S
            if len(self)
            else float("nan")
        )

    def cdf(self) -> Iterator[tuple[float, float]]:
        """Yield (seconds, share of values up to it), ascending."""
        for step in self._counts.get_recorded_iterator():
            yield step.value_iterated_to / _UNITS_PER_S, step.total_count_to_this_value / len(self)


@dataclass(slots=True)
class Slice:
    """The requests that were due in a time slice."""

    num_due: int = 0
    num_good: int = 0  # answered within the SLO
    # by outcome; requests without an answer have "error"
    outcomes: Counter[str] = field(default_factory=Counter)
    latency: Latency = field(default_factory=lambda: Latency(2))

    def merge(self, other: Slice) -> None:
        """Add the requests of another slice."""
        self.num_due += other.num_due
        self.num_good += other.num_good
        self.outcomes.update(other.outcomes)
        self.latency.merge(other.latency)


class Slices:
    """At most `MAX_SLICES` time slices of equal width.

    The width doubles when the run gets longer.
    """

    def __init__(self) -> None:
        self.width_s = 0.25
        self.slices: list[Slice] = []

    def at(self, due_at: float) -> Slice:
        """Return the slice of a time in seconds after the run began."""
        while (index := int(max(due_at, 0.0) / self.width_s)) >= MAX_SLICES:
            self._halve()
        while len(self.slices) <= index:
            self.slices.append(Slice())
        return self.slices[index]

    def _halve(self) -> None:
        self.width_s *= 2
        for left, right in zip(self.slices[::2], self.slices[1::2], strict=False):
            left.merge(right)
        self.slices = self.slices[::2]


class Point(NamedTuple):
    """One request of a run."""

    due_at: float  # seconds after the run began
    latency_s: float
    outcome: str  # or "error"


class Scatter:
    """A sample of the requests: the `max_points` with the smallest hashes."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        # a heap of (negative hash, point), so that the largest hash is first
        self._sample: list[tuple[int, Point]] = []

    def add(self, number: int, point: Point) -> None:
        """Add a request with its number in the log."""
        entry = (-xxhash.xxh3_64_intdigest(struct.pack("<qd", number, point.due_at)), point)
        if len(self._sample) < self._max_points:
            heapq.heappush(self._sample, entry)
        else:
            heapq.heappushpop(self._sample, entry)

    def points(self) -> list[Point]:
        """Return the sample by due time."""
        return sorted(point for _, point in self._sample)


# ---- quality of served scores

F64 = npt.NDArray[np.float64]


def ndcg_at(k: int, scores: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Compute NDCG@k with binary gains, averaged over tied orders; NaN without a positive.

    Args:
        k: Cutoff, at least 1.
        scores: [n], higher is better.
        labels: [n], 0 or 1.
    """
    values, positive = _read(scores, labels)
    if not positive.any():
        return nan
    discount = 1 / np.log2(np.arange(2, len(values) + 2))
    discount[k:] = 0
    dcg = sum(
        discount[start:stop].mean() * num_positive
        for start, stop, num_positive in _tied(values, positive)
    )
    return float(dcg / discount[: int(positive.sum())].sum())


def _read(scores: npt.ArrayLike, labels: npt.ArrayLike) -> tuple[F64, npt.NDArray[np.bool_]]:
    values = np.asarray(scores, np.float64)
    positive = np.asarray(labels) > 0
    assert values.ndim == 1
    assert values.shape == positive.shape
    return np.where(np.isnan(values), -np.inf, values), positive


def _tied(values: F64, positive: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int, int]]:
    """Yield groups of equal scores, best first: (start, stop, number of positives)."""
    order = np.argsort(-values, kind="stable")
    ranked = values[order]
    starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
    num_positive = np.add.reduceat(positive[order].astype(np.int64), starts)
    yield from zip(
        starts.tolist(), [*starts[1:].tolist(), len(values)], num_positive.tolist(), strict=True
    )


# ---- the sums

HITS = (Outcome.HBM_HIT, Outcome.JOINED, Outcome.DRAM_HIT)

# of a float32 score: sign, 8 bits of exponent, 11 of mantissa; smaller differences count as ties
_SCORE_BITS = 20


class PooledAuc:
    """Streaming AUC, from counts of scores rounded to 11 bits of mantissa."""

    def __init__(self) -> None:
        # by label, then score in ascending order
        self.counts: npt.NDArray[np.int64] = np.zeros((2, 1 << _SCORE_BITS), np.int64)

    def add(self, scores: npt.NDArray[np.float64], labels: npt.NDArray[np.bool_]) -> None:
        """Add scores without NaN, and whether each is positive."""
        bits = (scores.astype("<f4") + np.float32(0)).view("<u4")  # -0.0 becomes 0.0
        # map to unsigned integers in the order of the scores
        ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
        rounded = np.minimum(ordered.astype(np.int64) + (1 << (31 - _SCORE_BITS)), (1 << 32) - 1)
        np.add.at(self.counts, (labels.astype(np.int64), rounded >> (32 - _SCORE_BITS)), 1)

    def value(self) -> float:
        """Return the AUC; NaN without positives or negatives."""
        negative, positive = self.counts.astype(np.float64)
        pairs = negative.sum() * positive.sum()
        below = np.cumsum(negative) - negative
        return float((positive * (below + negative / 2)).sum() / pairs) if pairs else float("nan")


class Tally:
    """Sums over the samples of a run, for `report.summarise`.

    Args:
        slo_s: Latency objective, in seconds.
        warmup_s: Samples due earlier count only in `num_warmup`.
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
        self.num_scored = 0  # requests of kinds with scores
        self.num_within_slo = 0  # of these
        self.num_resent = 0
        self.num_bytes = 0  # of bodies
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.model_versions: Counter[str] = Counter()
        # "equal" or "different" to the digest in the log
        self.logged_digests: Counter[str] = Counter()
        self.history_tokens = 0
        self.prefix_tokens = 0  # of these, read from cached KV
        # seconds after the run began
        self.first_due_at = float("inf")
        self.last_due_at = 0.0
        self.ended_at = 0.0
        self.auc: defaultdict[str, PooledAuc] = defaultdict(PooledAuc)
        self.ndcg: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0])  # sum, count

    def add(self, sample: Sample) -> None:
        """Add a finished request."""
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
