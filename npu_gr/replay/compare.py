"""Compare two runs of a log: ratios with confidence intervals, and differences of scores.

Intervals come from a block bootstrap: requests are cut into blocks of consecutive requests, and
blocks are drawn with replacement. If both runs answered the same requests, the same blocks are
drawn for both, so that a slow part of the log affects both and cancels. Percentiles come from
histograms with bins of 0.5 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Group
from rich.table import Table

from npu_gr.core.errors import DataError
from npu_gr.replay.answers import AnswerLine, read_answers
from npu_gr.replay.score_difference import TOP, score_difference

F64 = npt.NDArray[np.float64]

BLOCKS = 100
RESAMPLES = 1000
WORST = 5  # reported records with the largest drift

_BIN_RATIO = 1.005  # ratio of consecutive bin edges of latencies
_LOW_MS = 1e-3  # lower edge of the first bin


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRatio:
    """A metric of both runs, and the ratio B / A with its 95 % interval."""

    name: str
    a: float
    b: float
    ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Differences between the scores of B and those of A.

    A drift is the largest difference within a request, over the standard deviation of A's scores in
    that request.
    """

    num_compared: int  # requests that both runs answered
    num_same_digest: int
    num_with_values: int  # requests with scores in both runs; the values below are of these
    max_drift: float = math.nan
    p50_drift: float = math.nan
    p99_drift: float = math.nan
    max_abs: float = math.nan  # in the scores' own unit
    top_overlap: float = math.nan  # mean overlap of the `TOP` best items
    same_first_ratio: float = math.nan
    num_unknown_differs: int = 0  # requests whose sets of items without a score differ
    worst: list[tuple[int, float]] = field(default_factory=list)  # (record number, drift)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of a comparison."""

    a: str
    b: str
    is_paired: bool  # both runs answered the same requests
    ratios: list[MetricRatio]
    drift: Drift
    model_versions: tuple[list[str], list[str]]

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def render(self) -> Group:
        """Format tables for a terminal."""
        times = Table(
            "",
            "A",
            "B",
            "B / A",
            "95 % interval",
            box=box.SIMPLE,
            title=f"A = {self.a}\nB = {self.b}",
        )
        for row in self.ratios:
            interval = f"{row.low:.3f} .. {row.high:.3f}"
            times.add_row(row.name, f"{row.a:.3f}", f"{row.b:.3f}", f"{row.ratio:.3f}", interval)
        drift = self.drift
        scores = Table(show_header=False, box=box.SIMPLE, title="Scores")
        scores.add_row("answered by both", str(drift.num_compared))
        scores.add_row("bit for bit the same", str(drift.num_same_digest))
        if drift.num_with_values:
            scores.add_row(
                "drift, P50 / P99 / max",
                f"{drift.p50_drift:.2e} / {drift.p99_drift:.2e} / {drift.max_drift:.2e} sd",
            )
            scores.add_row("largest difference", f"{drift.max_abs:.3e}")
            scores.add_row(
                f"same first; best {TOP} shared",
                f"{drift.same_first_ratio:.2%}; {drift.top_overlap:.2%}",
            )
            scores.add_row("farthest records", ", ".join(f"#{n} {d:.1e}" for n, d in drift.worst))
        if drift.num_unknown_differs:
            scores.add_row("another set of unknown items", str(drift.num_unknown_differs))
        for letter, versions in zip("AB", self.model_versions, strict=True):
            scores.add_row(f"model versions of {letter}", ", ".join(versions) or "not known")
        return Group(times, scores)


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """The answers of one run. n = requests, ascending by number."""

    numbers: npt.NDArray[np.int64]  # [n]
    latencies_ms: F64  # [n] NaN = failed
    digests: list[str]
    scores: list[dict[str, npt.NDArray[np.float32]]]  # empty if only the digest was logged
    versions: list[str]


def compare(a: Path, b: Path, slo_s: float, seed: int = 0) -> Comparison:
    """Compare two runs.

    Args:
        a, b: Folders that `npu-gr replay --out` wrote, files of answers, or recorded logs with
            answers.
        slo_s: Latency objective, in seconds.
        seed: Seed of the bootstrap.

    Raises:
        DataError: a file cannot be read, or has no answers.
    """
    first = _load(a)
    second = _load(b)
    ratios, is_paired = _ratios(first, second, slo_s * 1e3, np.random.default_rng(seed))
    return Comparison(
        a=str(a),
        b=str(b),
        is_paired=is_paired,
        ratios=ratios,
        drift=_drift(first, second),
        model_versions=(first.versions, second.versions),
    )


def _load(path: Path) -> _Run:
    file = path / "answers.jsonl.gz" if path.is_dir() else path
    rows: list[AnswerLine] = sorted(read_answers(file), key=lambda row: row.number)
    if not rows:
        raise DataError(f"{file}: no answers")
    return _Run(
        np.array([row.number for row in rows], np.int64),
        np.array([math.nan if row.error else row.latency_ms for row in rows]),
        ["" if row.error else row.digest for row in rows],
        [{task: np.frombuffer(raw, "<f4") for task, raw in row.scores.items()} for row in rows],
        sorted({row.model_version for row in rows if row.model_version}),
    )


# ---- times


def _ratios(
    a: _Run, b: _Run, slo_ms: float, random: np.random.Generator
) -> tuple[list[MetricRatio], bool]:
    is_paired = np.array_equal(a.numbers, b.numbers)
    blocks = [_Blocks.of(run, slo_ms) for run in (a, b)]
    draws_a = _draws(blocks[0].num_blocks, random)
    draws_b = draws_a if is_paired else _draws(blocks[1].num_blocks, random)
    found = []
    with np.errstate(divide="ignore", invalid="ignore"):  # NaN if no request was answered
        values = [part.statistics(np.ones((1, part.num_blocks))) for part in blocks]
        drawn = [
            part.statistics(draws) for part, draws in zip(blocks, (draws_a, draws_b), strict=True)
        ]
        for name in values[0]:
            ratios = drawn[1][name] / drawn[0][name]
            finite = ratios[np.isfinite(ratios)]
            low, high = (
                np.percentile(finite, (2.5, 97.5)).tolist() if len(finite) else (math.nan, math.nan)
            )
            of_a = float(values[0][name][0])
            of_b = float(values[1][name][0])
            ratio = float(np.divide(of_b, of_a))  # with numpy, since the divisor may be 0
            found.append(MetricRatio(name=name, a=of_a, b=of_b, ratio=ratio, low=low, high=high))
    return found, is_paired


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """Counts of a run by block of consecutive requests."""

    bins: F64  # [blocks, bins] answers by latency, without empty bins
    middles_ms: F64  # [bins] centres of the bins
    good: F64  # [blocks, 2] requests within the SLO, and all requests

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.bins)

    @classmethod
    def of(cls, run: _Run, slo_ms: float) -> _Blocks:
        num = min(BLOCKS, len(run.numbers))
        block = np.arange(len(run.numbers)) * num // len(run.numbers)
        answered = ~np.isnan(run.latencies_ms)
        clipped = np.clip(run.latencies_ms[answered], _LOW_MS, None)
        places = np.floor(np.log(clipped / _LOW_MS) / math.log(_BIN_RATIO))
        used, place = np.unique(places, return_inverse=True)
        bins = np.zeros((num, len(used)))
        good = np.zeros((num, 2))
        np.add.at(bins, (block[answered], place), 1)
        np.add.at(good[:, 0], block, run.latencies_ms <= slo_ms)
        np.add.at(good[:, 1], block, 1)
        return cls(bins, _LOW_MS * _BIN_RATIO ** (used + 0.5), good)

    def statistics(self, draws: F64) -> dict[str, npt.NDArray[Any]]:
        """Compute each metric for each draw; NaN if a draw has no answers.

        Args:
            draws: Weights of the blocks: float64 [n, blocks].

        Returns:
            Name of the metric -> [n].
        """
        good = draws @ self.good
        within = good[:, 0] / good[:, 1]
        counts = draws @ self.bins
        if not counts.shape[1]:
            nothing = np.full(len(draws), math.nan)
            return {
                **dict.fromkeys(("P50 ms", "P95 ms", "P99 ms", "mean ms"), nothing),
                "within SLO": within,
            }
        upto = np.cumsum(counts, 1)
        total = upto[:, -1]
        found: dict[str, npt.NDArray[Any]] = {
            f"P{percent} ms": self.middles_ms[np.argmax(upto >= percent / 100 * total[:, None], 1)]
            for percent in (50, 95, 99)
        }
        return {**found, "mean ms": counts @ self.middles_ms / total, "within SLO": within}


def _draws(num_blocks: int, random: np.random.Generator) -> F64:
    """Draw blocks with replacement: counts [RESAMPLES, blocks]."""
    draws: F64 = random.multinomial(
        num_blocks, np.full(num_blocks, 1 / num_blocks), RESAMPLES
    ).astype(np.float64)
    return draws


# ---- scores


def _drift(a: _Run, b: _Run) -> Drift:
    _, of_a, of_b = np.intersect1d(a.numbers, b.numbers, return_indices=True)
    both = [
        (i, j)
        for i, j in zip(of_a.tolist(), of_b.tolist(), strict=True)
        if a.digests[i] and b.digests[j]
    ]
    same = sum(a.digests[i] == b.digests[j] for i, j in both)
    drifts: list[tuple[float, int]] = []
    largest = 0.0
    overlaps = []
    firsts = 0
    unknown = 0
    for i, j in both:
        left = a.scores[i]
        right = b.scores[j]
        if (
            not left
            or left.keys() != right.keys()
            or any(len(left[task]) != len(right[task]) for task in left)
        ):
            continue
        if any(not np.array_equal(np.isnan(left[task]), np.isnan(right[task])) for task in left):
            unknown += 1
        differences = [score_difference(left[task], right[task]) for task in sorted(left)]
        drifts.append((max(one.drift for one in differences), int(a.numbers[i])))
        largest = max(largest, *(one.max_abs for one in differences))
        overlaps.append(differences[0].top_overlap)
        firsts += differences[0].has_same_first
    if not drifts:
        return Drift(num_compared=len(both), num_same_digest=same, num_with_values=0)
    values = np.array([drift for drift, _ in drifts])
    return Drift(
        num_compared=len(both),
        num_same_digest=same,
        num_with_values=len(drifts),
        max_drift=float(values.max()),
        p50_drift=float(np.median(values)),
        p99_drift=float(np.percentile(values, 99)),
        max_abs=largest,
        top_overlap=float(np.mean(overlaps)),
        same_first_ratio=firsts / len(drifts),
        num_unknown_differs=unknown,
        worst=[(number, drift) for drift, number in _largest(drifts)],
    )


def _largest(drifts: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
    return sorted(drifts, key=lambda pair: (-pair[0], pair[1]))[:WORST]
