"""Rank the next item of each user among the whole catalogue: the protocol of all evaluations.

The next item is that of the first event after a user's trained ones. It is ranked among all items;
no negatives are sampled. There are two ranks:

  overall   among all items
  unseen    among the items that are not in the user's history, as a request with `exclude_seen`
            ranks. It never answers a repeat (the user had the next item before): its rank is inf

If more than a fifth of the next items are repeats, models are evaluated by the overall ranks; else
by the unseen ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from rich.table import Table

from npu_gr.train.data import Bools, InteractionLog, NextItem, evaluation_title
from npu_gr.train.metrics import (
    F64,
    NAN,
    Difference,
    cells,
    difference_of_users,
    hit_ratio,
    hits,
    known,
    ndcg,
    ndcg_of_each,
    rank_of,
)

K = 10
# Share of repeats above which models are evaluated by the overall ranks. About every second repeat
# is among the ten best of a user's own items, but about every tenth new item among those of a
# model: so from some 17 % on, leaving out what was seen costs more than it gives.
MANY_REPEATS = 0.2


def sample_targets(targets: Sequence[NextItem], num_users: int, seed: int) -> Sequence[NextItem]:
    """Draw at most `num_users` of the targets at random, in their order."""
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
    def evaluates_all(self) -> bool:
        """Whether models are evaluated by the overall ranks, not by the unseen ones."""
        return self.repeat_ratio > MANY_REPEATS

    @property
    def evaluated(self) -> F64:
        """The ranks that a model is evaluated by."""
        return self.overall if self.evaluates_all else self.unseen


NO_RANKS = NextItemRanks(np.empty(0), np.empty(0), np.empty(0, np.bool_))


def rank_next_items(
    log: InteractionLog, targets: Sequence[NextItem], scores: Iterable[F64]
) -> NextItemRanks:
    """Rank the targets under some model's scores.

    Args:
        log: Log that holds the users' histories.
        targets: Next items to rank.
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
        if is_repeat[index]:
            unseen[index] = np.inf
            continue
        others = row.copy()
        others[history] = -np.inf
        unseen[index] = rank_of(others, item)
    return NextItemRanks(overall, unseen, is_repeat)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineComparison:
    """A model compared with the strongest baseline, on the same next items."""

    model: str
    # the baseline with the highest first figure of the evaluation; ties go by the next figure
    baseline: str
    differences: dict[str, Difference]  # figure -> the model's minus the baseline's
    is_better: bool  # significantly better by one figure of the evaluation, worse by none
    grounds: str  # which figures evaluate the model, and why, in words

    def text(self) -> str:
        """Describe the differences in words, with a warning if the model is not better."""
        figures = "\n".join(
            f"  {name:<15} {found.mean:+.4f}  (95 %: {found.low:+.4f} .. {found.high:+.4f})"
            for name, found in self.differences.items()
        )
        text = (
            f"{self.model} minus {self.baseline}, the strongest baseline, paired by "
            f"user:\n{figures}\n{self.grounds}"
        )
        if self.is_better:
            return text
        return (
            f"{text}\nWARNING: {self.model} is not shown to be better than {self.baseline} on this "
            "log, so the baseline's recommendations are as good. More events, more epochs or other "
            "settings may help."
        )

    def as_dict(self) -> dict[str, object]:
        """Turn the comparison into plain types for JSON."""
        differences = {name: found._asdict() for name, found in self.differences.items()}
        return {
            "model": self.model,
            "baseline": self.baseline,
            "is_better": self.is_better,
            "grounds": self.grounds,
            "differences": differences,
        }


def compare(
    model: str, ranks: NextItemRanks, baselines: Mapping[str, NextItemRanks]
) -> BaselineComparison | None:
    """Compare a model with the strongest baseline; None = there is no user or no baseline.

    The comparison uses the unseen ranks, or the overall ranks if most next items are repeats.

    Args:
        model: Name of the model.
        ranks: [users] the model's ranks.
        baselines: Name -> ranks of the same users' next items.
    """
    if not len(ranks.unseen) or not baselines:
        return None
    best = max(
        baselines,
        key=lambda name: (
            hit_ratio(baselines[name].evaluated, K),
            ndcg(baselines[name].evaluated, K),
        ),
    )
    theirs = baselines[best]
    kinds = {" unseen": (ranks.unseen, theirs.unseen), "": (ranks.overall, theirs.overall)}
    evaluated, other = ("", " unseen") if ranks.evaluates_all else (" unseen", "")
    differences = {
        f"{name}@{K}{kind}": difference_of_users(
            figure(kinds[kind][0], K), figure(kinds[kind][1], K)
        )
        for kind in (evaluated, other)
        for name, figure in (("HR", hits), ("NDCG", ndcg_of_each))
    }
    of_what = "all items" if ranks.evaluates_all else "unseen items"
    return BaselineComparison(
        model=model,
        baseline=best,
        differences=differences,
        is_better=_is_better(
            {
                name: found
                for name, found in differences.items()
                if name.endswith(f"@{K}{evaluated}")
            }
        ),
        grounds=f"evaluated on {of_what}: {_of_repeats(ranks.repeat_ratio)}",
    )


def _of_repeats(ratio: float) -> str:
    """Say how many next items are repeats, and what that means for figures of unseen items."""
    words = f"{ratio:.0%} of the next items are repeats (the user had the item before)"
    return f"{words}, which are missed among unseen items" if ratio else words


def compare_hits(
    model: str, ranks: F64, baselines: Mapping[str, F64], ks: tuple[int, ...] = (50, 10)
) -> BaselineComparison | None:
    """Compare HIT@k of a model with that of the strongest baseline.

    Args:
        model: Name of the model.
        ranks: [users] rank of each user's held-out item, from 0.
        baselines: Name -> ranks of the same users' items.
        ks: Values of k to compare; the first decides which baseline is the strongest.

    Returns:
        None = there is no user or no baseline.
    """
    if not len(ranks) or not baselines:
        return None
    best = max(baselines, key=lambda name: hit_ratio(baselines[name], ks[0]))
    differences = {
        f"HIT@{k}": difference_of_users(hits(ranks, k), hits(baselines[best], k)) for k in ks
    }
    return BaselineComparison(
        model=model,
        baseline=best,
        differences=differences,
        is_better=_is_better(differences),
        grounds="evaluated on items that the users do not have",
    )


def _is_better(differences: Mapping[str, Difference]) -> bool:
    """Whether a model is significantly better by one figure, and significantly worse by none."""
    found = differences.values()
    return any(figure.low > 0 for figure in found) and all(figure.high > 0 for figure in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalFigures:
    """One model's figures. NaN = the model does not have that figure."""

    model: str
    num_users: int  # users whose next items the figures average
    hr_at_10: float
    ndcg_at_10: float
    hr_at_50: float
    hr_at_10_unseen: float = NAN
    ndcg_at_10_unseen: float = NAN
    invalid_ratio: float = NAN  # share of the answered items that are not in the catalogue
    ranks: NextItemRanks = field(default=NO_RANKS, repr=False, compare=False)

    @classmethod
    def from_ranks(
        cls, ranks: NextItemRanks, model: str, invalid_ratio: float = NAN
    ) -> RetrievalFigures:
        """Compute the figures of a model.

        Args:
            ranks: Ranks of the next items; inf = not found, empty `unseen` = not measured.
            model: Name of the model.
            invalid_ratio: Share of the answered items that are not in the catalogue.
        """
        overall, unseen, _ = ranks
        if not len(overall):
            return cls(model=model, num_users=0, hr_at_10=NAN, ndcg_at_10=NAN, hr_at_50=NAN)
        return cls(
            model=model,
            num_users=len(overall),
            hr_at_10=hit_ratio(overall, 10),
            ndcg_at_10=ndcg(overall, 10),
            hr_at_50=hit_ratio(overall, 50),
            hr_at_10_unseen=hit_ratio(unseen, 10) if len(unseen) else NAN,
            ndcg_at_10_unseen=ndcg(unseen, 10) if len(unseen) else NAN,
            invalid_ratio=invalid_ratio,
            ranks=ranks,
        )

    @property
    def score(self) -> float:
        """NDCG@10 of the items that a model is evaluated by."""
        return self.ndcg_at_10 if self.ranks.evaluates_all else self.ndcg_at_10_unseen

    @property
    def interval(self) -> float:
        """Half the width of HR@10's 95 % confidence interval, by the normal approximation."""
        return float(1.96 * np.sqrt(self.hr_at_10 * (1 - self.hr_at_10) / max(self.num_users, 1)))


class Baseline(Protocol):
    """A baseline, fitted to the trained events of a log."""

    name: str

    def liking(self, log: InteractionLog) -> F64 | None:
        """Predict how much the user likes the item of each event, from the user's earlier events.

        Returns:
            float64 [n]; None = the baseline does not predict ratings.
        """
        ...

    def next_items(self, log: InteractionLog, user: int) -> F64:
        """Score each item as the user's next one after the trained events, float64 [num_items]."""
        ...


def baseline_figures(
    log: InteractionLog, targets: Sequence[NextItem], baseline: Baseline
) -> RetrievalFigures:
    """Rank the targets by a baseline that was fitted to the log's trained events."""
    ranks = rank_next_items(log, targets, (baseline.next_items(log, user) for user, _ in targets))
    return RetrievalFigures.from_ranks(ranks, baseline.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalReport:
    """A model's figures and the baselines'."""

    num_trained: int  # events that the evaluated model was trained on
    num_served: int  # events that the served model was trained on
    own: RetrievalFigures
    baselines: tuple[RetrievalFigures, ...]
    skipped: tuple[str, ...] = ()  # a sentence for each baseline that was skipped
    made: str = ""  # what the model was made of, in words
    # what the validation chose, and its figures, by name
    chosen: dict[str, Any] = field(default_factory=dict)

    def comparison(self) -> BaselineComparison | None:
        """Compare the model with the strongest baseline; None = there is no user to compare on."""
        return compare(
            self.own.model, self.own.ranks, {row.model: row.ranks for row in self.baselines}
        )

    def as_dict(self) -> dict[str, Any]:
        """Turn the report into plain types for JSON, without figures that a model does not have."""
        comparison = self.comparison()
        return {
            "num_trained": self.num_trained,
            "num_served": self.num_served,
            **self.chosen,
            "test": known(asdict(self.own)),
            "baselines": [known(asdict(row)) for row in self.baselines],
            "comparison": None if comparison is None else comparison.as_dict(),
        }

    def text(self) -> str:
        """Describe what was chosen, and compare the model with the strongest baseline."""
        comparison = self.comparison()
        words = "no user has a next item to compare on" if comparison is None else comparison.text()
        return "\n".join([*filter(None, [self.made]), *self.skipped, words])

    def table(self) -> Table:
        """Lay the figures out for a terminal."""
        columns = {"HR@10": "hr_at_10", "NDCG@10": "ndcg_at_10", "HR@50": "hr_at_50"}
        columns |= {"HR@10 unseen": "hr_at_10_unseen", "NDCG@10 unseen": "ndcg_at_10_unseen"}
        if self.own.invalid_ratio == self.own.invalid_ratio:
            columns |= {"invalid": "invalid_ratio"}
        table = Table(
            "model",
            *columns,
            title=evaluation_title("leave-one-out", self.num_trained, self.num_served),
            caption=f"whole catalogue, {self.own.num_users} users; 95 % interval of the HR@10 of "
            f"{self.own.model}: +-{self.own.interval:.4f}",
        )
        for row in (*self.baselines, self.own):
            table.add_row(row.model, *cells(getattr(row, name) for name in columns.values()))
        return table
