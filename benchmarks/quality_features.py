"""`python -m benchmarks quality --only features`: what features are worth to a ranker, on MovieLens-100K.

    validation   the trained part of the log, split again: one training of the ranker with each group of features, less
                 one without. A group is chosen if the AUC of liking rises by more than its standard error
    test         all that was chosen together, less the ranker without and less matrix factorisation: AUC of liking over
                 the newest fifth of each user, HR@10 and NDCG@10 of the next item. It is looked at once

The features are those of the package's files of users and items and what we compute of histories and times. What is
computed by an item's feature needs that feature, so such a group is less `item`. An interval is of the difference, by
users; of several trainings with the noise between them. `ok` says that ours is not worse beyond it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.frame import Line
from npu_gr.core.arrays import I64
from npu_gr.core.feature_schema.factors import MF_SCORE
from npu_gr.dataset import PrepareOptions, prepare
from npu_gr.features.interactions import Interactions, ItemValues, movielens_100k
from npu_gr.train.baselines import MatrixFactorisation
from npu_gr.train.data import Bools, InteractionLog, Split, build_log
from npu_gr.train.metrics import F64, auc_terms, hits, ndcg_of_each
from npu_gr.train.next_item import sample_targets
from npu_gr.train.paired import NORMAL, Difference, difference
from npu_gr.train.rank.alone import better_alone, to_serve
from npu_gr.train.rank.evaluate import RankingFigures, evaluate_baseline, evaluate_ranker
from npu_gr.train.rank.fit import fit
from npu_gr.train.rank.held_out import hold_out
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.options import TrainOptions
from npu_gr.train.rank.order import NUM_FOLLOWERS, ListSizes, count_order, fit_order, retrieved_lists
from npu_gr.train.rank.schema import choose_features
from npu_gr.train.rank.tasks import CLICK, LIKE, positives
from npu_gr.train.steps import TrainingProgress

K = 10
SPLIT: Split = "user-time"
TASKS = (CLICK, LIKE)
FIGURES = {"HR": hits, "NDCG": ndcg_of_each}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What a ranker reads beside items, actions and times, and the group that it is compared with."""

    name: str
    less: str = "no features"
    with_users: bool = False
    with_items: bool = False
    computed: tuple[str, ...] = ()


NONE = Group(name="no features", less="")
GROUPS = (
    Group(name="user", with_users=True),
    Group(name="request", computed=("hour", "weekday")),
    Group(name="mf_score", computed=(MF_SCORE,)),
    Group(name="item", with_items=True),
    Group(name="rates", less="item", with_items=True, computed=("rate_by:*", "rate_by:class", "rate_by:release_year")),
    Group(name="shares", less="item", with_items=True, computed=("share_by:class", "recency_by:class")),
    Group(name="counts", less="item", with_items=True, computed=("events_by:class", "likes_by:class")),
)


def together(groups: Sequence[Group]) -> Group:
    """Read all that some groups read."""
    return Group(
        name=" + ".join(group.name for group in groups),
        with_users=any(group.with_users for group in groups),
        with_items=any(group.with_items for group in groups),
        computed=tuple(name for group in groups for name in group.computed),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Trainings of one group on the same events, one a seed."""

    figures: Sequence[RankingFigures]
    likes: Bools  # [judged events]
    users: I64  # [judged events]

    @property
    def aucs(self) -> F64:
        """AUC of each training."""
        return np.array([row.auc for row in self.figures])

    def each(self, name: str, *, unseen: bool) -> F64:
        """One of FIGURES of each next item: [trainings, users]."""
        ranks = [row.ranks.unseen if unseen else row.ranks.overall for row in self.figures]
        return np.array([FIGURES[name](row, K) for row in ranks])


def movielens() -> tuple[Interactions, list[ItemValues]]:
    """Read MovieLens-100K with the features of its users and items.

    Raises:
        DataError: the package recbole is not installed.
    """
    log = movielens_100k()
    options = PrepareOptions(user_features=("age:number", "gender", "occupation"))
    with tempfile.TemporaryDirectory() as folder:
        made = prepare(
            log, Path(folder) / "data", options, items=log.with_suffix(".item"), users=log.with_suffix(".user")
        )
        return made.dataset.interactions(), made.dataset.item_features()


def movielens_lines(rank: TrainOptions, seeds: Sequence[int]) -> Iterator[Line]:
    """Choose groups of features on the validation, and compare the ranker with them with the one without on the test.

    Args:
        rank: of each training.
        seeds: of the trainings.

    Raises:
        DataError: the package recbole is not installed.
    """
    events, items = movielens()
    chosen = []
    found = {NONE.name: compared(events, items, NONE, rank, seeds[:1], on_validation=True)}
    for group in GROUPS:
        ours, theirs = compared(events, items, group, rank, seeds[:1], on_validation=True), found[group.less]
        found[group.name] = ours
        yield auc_line(f"features MovieLens-100K, validation: {group.name}", ours, group.less, theirs)
        gap = auc_difference(ours, theirs)
        if gap.mean > (gap.mean - gap.low) / NORMAL:
            chosen.append(group)
    if not chosen:
        return
    case = f"features MovieLens-100K: {together(chosen).name}"
    plain = compared(events, items, NONE, rank, seeds)
    ours = compared(events, items, together(chosen), rank, seeds)
    yield from lines_of(case, ours, NONE.name, plain)
    simple = factorised(events, seeds)
    for name, one in ((case, ours), (f"features MovieLens-100K: {NONE.name}", plain)):
        yield auc_line(name, one, MatrixFactorisation.name, simple)


def lines_of(case: str, ours: Compared, less: str, theirs: Compared) -> Iterator[Line]:
    """Compare two groups by each figure."""
    yield auc_line(case, ours, less, theirs)
    for unseen in (True, False):
        for name in FIGURES:
            own, other = (one.each(name, unseen=unseen) for one in (ours, theirs))
            told = f"{name}@{K}"
            yield _line(f"{case}, {told}{' unseen' if unseen else ''}", told, own, less, other, difference(own, other))


def auc_line(case: str, ours: Compared, less: str, theirs: Compared) -> Line:
    """Compare two groups by the AUC of liking."""
    return _line(f"{case}, AUC like", "AUC", ours.aucs, less, theirs.aucs, auc_difference(ours, theirs))


def compared(
    events: Interactions,
    items: Sequence[ItemValues],
    group: Group,
    rank: TrainOptions,
    seeds: Sequence[int],
    *,
    on_validation: bool = False,
) -> Compared:
    """Train and evaluate the ranker with one group of features, once a seed."""
    log = build_log(events if group.with_users else replace(events, columns=()), items, SPLIT)
    if on_validation:
        log = log.only_trained(SPLIT)
    known = items if group.with_items else ()
    likes = positives(log, LIKE)
    figures = []
    for seed in seeds:
        options = msgspec.structs.replace(rank, seed=seed, computed=group.computed)
        figures.append(_figures(log, known, likes, options))
    judged = ~log.trained
    return Compared(figures=figures, likes=likes[judged], users=log.users[judged])


def factorised(events: Interactions, seeds: Sequence[int]) -> Compared:
    """Evaluate matrix factorisation, once a seed."""
    log = build_log(events, (), SPLIT)
    likes = positives(log, LIKE)
    figures = [evaluate_baseline(log, MatrixFactorisation(log, seed), likes, ()) for seed in seeds]
    judged = ~log.trained
    return Compared(figures=figures, likes=likes[judged], users=log.users[judged])


def _figures(log: InteractionLog, items: Sequence[ItemValues], likes: Bools, options: TrainOptions) -> RankingFigures:
    """Train and evaluate one ranker, as `train_rank` does without the baselines."""
    held_out = hold_out(log, options)
    features = choose_features(held_out.log, items, TASKS, options)
    fitted = fit(held_out.log, items, TASKS, options, held_out.targets, "ranker", _ignore, features=features)
    counted = count_order(held_out.log, CLICK.name)
    sizes = ListSizes(options.num_retrieved, NUM_FOLLOWERS, options.num_neighbours)
    lists = list(retrieved_lists(LogInputs(log, fitted.model), fitted.model, counted, held_out.targets, sizes))
    order = fit_order(counted, log, lists, held_out.targets)
    ranker, _ = evaluate_ranker(
        log,
        fitted.model,
        likes,
        sample_targets(log.next_items(), options.test_users, options.seed),
        order=to_serve(order, better_alone(order, log, lists, held_out.targets)),
        counted=counted,
        like_task=TASKS.index(LIKE),
        sizes=sizes,
        done=lambda *_: None,
    )
    return ranker


def _ignore(progress: TrainingProgress) -> None:
    """Take a progress and do nothing."""


def auc_difference(ours: Compared, theirs: Compared) -> Difference:
    """Compare mean AUCs. Events of a user depend on each other, so users are counted; and trainings, where several are.

    Returns:
        Ours less theirs, with the interval of a normal distribution.
    """
    gaps = ours.aucs - theirs.aucs
    terms = _auc_terms(ours) - _auc_terms(theirs)
    variance = float(np.square(np.bincount(ours.users, terms)).sum())
    if len(gaps) > 1:
        variance += float(gaps.var(ddof=1)) / len(gaps)
    half = NORMAL * math.sqrt(variance)
    mean = float(gaps.mean())
    p = math.erfc(abs(mean) / (half / NORMAL) / math.sqrt(2)) if half else float(mean == 0)
    return Difference(mean, mean - half, mean + half, p)


def _auc_terms(found: Compared) -> F64:
    """Compute what each event moves the mean AUC by."""
    terms = np.zeros(len(found.likes))
    for row in found.figures:
        assert row.liking is not None
        terms += auc_terms(row.liking, found.likes) / len(found.figures)
    return terms


def _line(case: str, unit: str, ours: F64, baseline: str, theirs: F64, found: Difference) -> Line:
    value, other = float(ours.mean()), float(theirs.mean())
    return Line(
        bench="quality",
        case=case,
        ours=value,
        unit=unit,
        baseline=baseline,
        baseline_value=other,
        ratio=value / other if other else float("nan"),
        target=1.0,
        ok=found.high >= 0,
        low=found.low,
        high=found.high,
    )
