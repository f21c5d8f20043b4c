"""Rank the next item of each user among the whole catalogue: the protocol of the ranker and of the baselines.

The next item is that of the event right after a user's trained ones. No negatives are sampled: every item competes.
"Unseen" ranks leave out the items of the user's history, as a request that denies them does; the next item itself
stays in, even if the user had it before. Where people use things again these say little: a next item that its user
had before is then the only one of its kind left. So a model is judged by the ranks among all items if most of the next
items are repeats, and by the unseen ones if not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import I64
from npu_gr.train.data import Bools, InteractionLog, NextItem
from npu_gr.train.metrics import F64, auc, auc_terms, hit_ratio, hits, ndcg, ndcg_of_each, rank_of

MANY_REPEATS = 0.5  # share of repeats above which unseen items say too little to judge by


def sample_targets(targets: Sequence[NextItem], num_users: int, seed: int) -> Sequence[NextItem]:
    """Draw at most so many of the targets at random; keep their order."""
    if len(targets) <= num_users:
        return targets
    chosen = np.random.default_rng(seed).choice(len(targets), num_users, replace=False)
    return [targets[index] for index in sorted(chosen.tolist())]


class NextItemRanks(NamedTuple):
    """Rank of each next item, from 0; ties count half. n = users."""

    overall: F64  # [n] among all items
    unseen: F64  # [n] among the items that are not in the user's history; [0] = not measured
    is_repeat: Bools  # [n] whether the user had the next item before

    @property
    def repeat_ratio(self) -> float:
        """Share of the next items that their users had before; 0 of none."""
        return float(self.is_repeat.mean()) if len(self.is_repeat) else 0.0

    @property
    def judges_all(self) -> bool:
        """Whether a model is judged by the ranks among all items, not by the unseen ones."""
        return self.repeat_ratio > MANY_REPEATS

    @property
    def judged(self) -> F64:
        """The ranks that a model is judged by."""
        return self.overall if self.judges_all else self.unseen


NO_RANKS = NextItemRanks(np.empty(0), np.empty(0), np.empty(0, np.bool_))


def rank_next_items(log: InteractionLog, targets: Sequence[NextItem], scores: Iterable[F64]) -> NextItemRanks:
    """Rank the targets under some model's scores.

    Args:
        log: with the users' histories.
        targets: the next items to rank.
        scores: [num_items] for each target, in order.
    """
    overall = np.empty(len(targets))
    unseen = np.empty(len(targets))
    is_repeat = np.zeros(len(targets), np.bool_)
    for index, (target, row) in enumerate(zip(targets, scores, strict=True)):
        item = int(log.items[target.event])
        overall[index] = rank_of(row, item)
        history = log.items[log.starts[target.user] : target.event]
        is_repeat[index] = item in history
        others = row.copy()
        others[history[history != item]] = -np.inf
        unseen[index] = rank_of(others, item)
    return NextItemRanks(overall, unseen, is_repeat)


REPLICATES = 10_000
NORMAL = 1.96  # deviations on each side that hold 95 % of a normal distribution
K = 10
_BLOCK = 250  # replicates at a time


class Difference(NamedTuple):
    """The difference of two means; `low` .. `high` is its 95 % interval."""

    mean: float
    low: float
    high: float
    p: float  # two-sided; at least 1 / REPLICATES


def difference(ours: npt.NDArray[Any], theirs: npt.NDArray[Any], seed: int = 0) -> Difference:
    """Compare ours with theirs. Every replicate resamples seeds and users, so the interval holds the noise of both.

    Args:
        ours: [seeds, users] a metric of each user under each seed.
        theirs: the same metric, with the same seeds and users in the same order.
        seed: of the bootstrap.

    Returns:
        Ours less theirs.
    """
    gap = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    num_seeds, num_users = gap.shape
    random = np.random.default_rng(seed)
    means = np.empty(REPLICATES)
    for start in range(0, REPLICATES, _BLOCK):
        users = random.multinomial(num_users, np.full(num_users, 1 / num_users), _BLOCK)
        seeds = random.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), _BLOCK)
        means[start : start + _BLOCK] = ((users @ gap.T) * seeds).sum(1) / (num_users * num_seeds)
    return _difference(float(gap.mean()), means)


def difference_of_users(ours: F64, theirs: F64, seed: int = 0) -> Difference:
    """Compare one training of each model. Every replicate resamples users.

    Users with the same gap are drawn together, so a million users cost what a thousand do.

    Args:
        ours: [users] a metric of each user, which takes few distinct values.
        theirs: the same metric of the same users.
        seed: of the bootstrap.

    Returns:
        Ours less theirs.
    """
    gaps, counts = np.unique(ours - theirs, return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(len(ours), counts / len(ours), REPLICATES)
    return _difference(float((ours - theirs).mean()), drawn @ gaps / len(ours))


def _difference(mean: float, means: F64) -> Difference:
    low, high = np.quantile(means, [0.025, 0.975])
    p = 2 * min((means <= 0).mean(), (means >= 0).mean())
    return Difference(mean, float(low), float(high), float(min(1.0, max(p, 1 / REPLICATES))))


def difference_of_auc(ours: F64, theirs: F64 | None, labels: npt.NDArray[np.bool_], users: I64) -> Difference | None:
    """Compare two AUCs of the same events, or one with 0. A user's events depend on each other, so users are counted.

    Args:
        ours: [n] a score of each event.
        theirs: the same of another model; None = ours alone.
        labels: [n], True = positive.
        users: [n] whose event each is.

    Returns:
        Ours less theirs, with the interval of a normal distribution; None = a label has no event.
    """
    if labels.all() or not labels.any():
        return None
    mean = auc(ours, labels)
    terms = auc_terms(ours, labels)
    if theirs is not None:
        mean -= auc(theirs, labels)
        terms = terms - auc_terms(theirs, labels)
    deviation = float(np.sqrt(np.square(np.bincount(users, terms)).sum()))
    p = math.erfc(abs(mean) / deviation / math.sqrt(2)) if deviation else float(mean == 0)
    return Difference(mean, mean - NORMAL * deviation, mean + NORMAL * deviation, max(p, 1 / REPLICATES))


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineComparison:
    """A model beside the strongest baseline, on the same next items."""

    model: str
    baseline: str  # the one with the highest first figure that is judged by; of equals the next figure
    differences: dict[str, Difference]  # figure -> the model's less the baseline's
    is_better: bool  # beyond the interval by a figure that is judged by; worse by none
    grounds: str  # what is judged by, and why, in words

    def text(self) -> str:
        """Say in words how the model stands."""
        figures = "\n".join(
            f"  {name:<15} {found.mean:+.4f}  (95 %: {found.low:+.4f} .. {found.high:+.4f})"
            for name, found in self.differences.items()
        )
        text = f"{self.model} less {self.baseline}, the strongest baseline, by user:\n{figures}\n{self.grounds}"
        if self.is_better:
            return text
        return (
            f"{text}\nWARNING: {self.model} is not shown to be better than {self.baseline} on this log. More events, "
            "more epochs or other settings may help; until then the baseline's items are as good."
        )

    def as_dict(self) -> dict[str, object]:
        """Turn it into plain types for JSON."""
        differences = {name: found._asdict() for name, found in self.differences.items()}
        return {
            "model": self.model,
            "baseline": self.baseline,
            "is_better": self.is_better,
            "grounds": self.grounds,
            "differences": differences,
        }


def compare(model: str, ranks: NextItemRanks, baselines: Mapping[str, NextItemRanks]) -> BaselineComparison | None:
    """Compare a model with the strongest baseline; None = there is no user or no baseline.

    Judged by the unseen items, which recommendations are, or by all items where most next items are repeats.

    Args:
        model: its name.
        ranks: of each user's next item.
        baselines: name -> ranks of the same users.
    """
    if not len(ranks.unseen) or not baselines:
        return None
    best = max(baselines, key=lambda name: (hit_ratio(baselines[name].judged, K), ndcg(baselines[name].judged, K)))
    theirs = baselines[best]
    kinds = {" unseen": (ranks.unseen, theirs.unseen), "": (ranks.overall, theirs.overall)}
    judged, other = ("", " unseen") if ranks.judges_all else (" unseen", "")
    differences = {
        f"{name}@{K}{kind}": difference_of_users(figure(kinds[kind][0], K), figure(kinds[kind][1], K))
        for kind in (judged, other)
        for name, figure in (("HR", hits), ("NDCG", ndcg_of_each))
    }
    of_what = "all items" if ranks.judges_all else "unseen items"
    return BaselineComparison(
        model=model,
        baseline=best,
        differences=differences,
        is_better=_is_better({name: found for name, found in differences.items() if name.endswith(f"@{K}{judged}")}),
        grounds=f"judged by {of_what}: {_of_repeats(ranks.repeat_ratio)}",
    )


def _of_repeats(ratio: float) -> str:
    """Say what figures of unseen items are worth: a next item that its user had is then the only one of its kind."""
    words = f"{ratio:.0%} of the next items are repeats, which their users had before"
    return (
        f"{words}; figures of unseen items are too good by these, which compete with no other seen item"
        if ratio
        else words
    )


def compare_hits(
    model: str, ranks: F64, baselines: Mapping[str, F64], ks: tuple[int, ...] = (50, 10)
) -> BaselineComparison | None:
    """Compare HIT@k of a model with the baseline whose first one is highest; None = there is no user or no baseline.

    Args:
        model: its name.
        ranks: [users] of each user's held-out item, from 0.
        baselines: name -> ranks of the same users.
        ks: the figures to compare.
    """
    if not len(ranks) or not baselines:
        return None
    best = max(baselines, key=lambda name: hit_ratio(baselines[name], ks[0]))
    differences = {f"HIT@{k}": difference_of_users(hits(ranks, k), hits(baselines[best], k)) for k in ks}
    return BaselineComparison(
        model=model,
        baseline=best,
        differences=differences,
        is_better=_is_better(differences),
        grounds="judged by items that their users lack",
    )


def _is_better(differences: Mapping[str, Difference]) -> bool:
    """Whether a model is better beyond the interval by a figure, and worse by none."""
    found = differences.values()
    return any(figure.low > 0 for figure in found) and all(figure.high > 0 for figure in found)
