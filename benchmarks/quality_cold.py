"""`benchmarks quality --only cold`: cold-start items, scored by their features and codes alone.

    cold items  a random tenth of the items; all their events are removed from training
    training    the oldest 4/5 of each user's events, of which the last one is for validation
    evaluation  the newest 1/5 of each user's events. The history of an event is everything before
                it, including cold items, as if POST /v1/catalog/items had added them

The ranker reads the items' features. The generator's semantic IDs are made by residual k-means of
the items' neighbours and features; a cold item has no neighbours, so its ID follows from its
features.

  AUC like     events with cold items; positive: the value reaches the task's threshold
  AUC chosen   events with a cold item: share of the other cold items, new to the user, below it
  HR@10        rank of the events' cold items in the whole catalogue, without the history's items
  AUC warm     AUC like for events with other items, against the ranker without row dropout
  HR@10 warm   last events of the whole log, unseen, also NDCG@10: the same two rankers, each seed

A cold item has no popularity in training, so popularity has an AUC of .5. The other baselines use
its genre: number of events, and share of likes, of trained items of the genre.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from benchmarks.frame import Line
from npu_gr.core.arrays import I64
from npu_gr.history_store.interactions import Interactions, ItemValues
from npu_gr.model.feature_rows import NewItems
from npu_gr.model.hstu import HSTU
from npu_gr.model.weights import Checkpoint
from npu_gr.train.data import InteractionLog, NextItem, build_log, to_train_on
from npu_gr.train.generate.codes import (
    ItemCodes,
    codes_of_new,
    codes_text,
    item_vectors,
    residual_codes,
)
from npu_gr.train.generate.train import (
    COOCCURRENCE_WINDOW,
    SPLIT,
    GenerateOptions,
    GeneratorEvaluator,
    train_generator,
)
from npu_gr.train.metrics import (
    F64,
    Difference,
    auc,
    difference,
    difference_of_auc,
    difference_of_users,
    hits,
    ndcg_of_each,
)
from npu_gr.train.next_item import sample_targets
from npu_gr.train.rank.blend import NUM_FOLLOWERS, ItemList, ListSizes, retrieved_lists
from npu_gr.train.rank.evaluate import evaluated_logits
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.losses import user_vectors
from npu_gr.train.rank.options import TrainOptions
from npu_gr.train.rank.train import train_rank

COLD_RATIO = 0.1  # share of cold items
MAX_TARGETS = 1000  # most events with cold items for HR@10
LIKE = "like"
# targets
LEAST_AUC = 0.65  # AUC of cold items
LEAST_GAIN = 0.05  # gain of this AUC over a baseline's
LEAST_HITS = 0.8  # hit rate relative to the generator's
MOST_LOSS = 0.002  # loss of AUC of the other items


def cold_lines(
    interactions: Interactions,
    features: Sequence[ItemValues],
    case: str,
    rank: TrainOptions,
    generate: GenerateOptions,
) -> Iterator[Line]:
    """Train without a tenth of the items, and evaluate those.

    Args:
        interactions: Log of ratings.
        features: Item features; the first one is the genre of the baselines.
        case: Name of the log.
        rank, generate: Training options, without a refit.
    """
    split = cold_log(interactions, features, generate, rank.seed)
    log, first = split.evaluated, split.num_trained_items
    evaluated = ~log.trained
    is_cold = log.items >= first
    warm_users, cold_users = log.users[evaluated & ~is_cold], log.users[evaluated & is_cold]

    def trained(row_dropout: float) -> tuple[Checkpoint, HSTU, F64]:
        options = msgspec.structs.replace(rank, split=SPLIT, row_dropout=row_dropout)
        checkpoint, _ = train_rank(split.trained, split.features, options)
        wide = with_new_items(checkpoint.model, split.new)
        return (
            checkpoint,
            wide,
            evaluated_logits(LogInputs(log, wide), wide, wide.config.tasks.index(LIKE)),
        )

    checkpoint, wide, logits = trained(rank.row_dropout)
    _, _, plain = trained(0.0)
    likes = log.values >= 4
    labels, cold = likes[evaluated], is_cold[evaluated]
    genres = _genre_scores(split, features[0], likes.astype(np.float64))
    for name, scores in (
        ("popularity", np.zeros(len(log.items))),
        ("likes of the genre", genres.liked[log.items]),
    ):
        base = scores[evaluated][cold]
        yield _auc_line(
            f"cold {case}: AUC like", name, logits[cold], base, labels[cold], cold_users
        )
    yield _warm_line(
        f"cold {case}: AUC warm", logits[~cold], plain[~cold], labels[~cold], warm_users
    )

    events = np.flatnonzero(evaluated & is_cold)
    every = [
        NextItem(int(user), int(event))
        for user, event in zip(log.users[events], events, strict=True)
    ]
    targets = sample_targets(every, MAX_TARGETS, rank.seed)
    inputs = LogInputs(log, wide)
    vectors, table = user_vectors(inputs, wide, targets), wide.items.vectors()[first:]
    chosen = _chosen(log, targets, first, (vectors @ table.T).numpy().astype(np.float64))
    by_genre = _chosen(log, targets, first, np.tile(genres.popular[first:], (len(targets), 1)))
    for name, base in (
        ("popularity", np.full(len(targets), 0.5)),
        ("popularity of the genre", by_genre),
    ):
        yield _chosen_line(f"cold {case}: AUC chosen", name, chosen, base)

    order = checkpoint.order
    assert order is not None
    sizes = ListSizes(rank.num_retrieved, NUM_FOLLOWERS, rank.num_neighbours)
    lists = list(retrieved_lists(inputs, wide, order, targets, sizes))
    generated = _generated(split, generate, targets)
    for way, scores_of in (
        ("recommend", lambda found: found.scores(order)),
        ("its retrieval alone", lambda found: found.retrieval),
    ):
        ours = _ranks(log, lists, targets, scores_of)
        for k in (10, 50):
            yield _hits_line(f"cold {case}: {way}, HR@{k}", hits(ours, k), hits(generated, k))


def warm_lines(
    interactions: Interactions,
    features: Sequence[ItemValues],
    case: str,
    rank: TrainOptions,
    seeds: Sequence[int],
) -> Iterator[Line]:
    """Compare rankers with and without row dropout on the next items of all users.

    Args:
        interactions: The log.
        features: Item features.
        case: Name of the log.
        rank: Training options, without a refit.
        seeds: Random seeds of the trainings.
    """
    ours, theirs = (
        [
            train_rank(
                interactions,
                features,
                msgspec.structs.replace(rank, split=SPLIT, row_dropout=row_dropout, seed=seed),
            )[1].ranker.ranks.unseen
            for seed in seeds
        ]
        for row_dropout in (rank.row_dropout, 0.0)
    )
    for name, figure in (("HR@10", hits), ("NDCG@10", ndcg_of_each)):
        own, other = (np.array([figure(ranks, 10) for ranks in rows]) for rows in (ours, theirs))
        found = difference(own, other)
        case_of = f"cold {case}: {name} warm"
        value, base = float(own.mean()), float(other.mean())
        yield _line(case_of, name, value, "without row dropout", base, found, found.high >= 0)


class _Genres(NamedTuple):
    """Scores of n items by their genres, computed from trained items."""

    popular: F64  # [n] mean number of events of the genres' items
    liked: F64  # [n] share of likes among the events of the genres


def _genre_scores(split: ColdLog, genre: ItemValues, likes: F64) -> _Genres:
    log = split.evaluated
    known = log.trained & (log.items < split.num_trained_items)
    events = np.bincount(log.items[known], minlength=log.num_items).astype(np.float64)
    liked = np.bincount(log.items[known], likes[known], minlength=log.num_items)
    of_item = [genre.of_item.get(item, []) for item in log.item_ids.tolist()]
    sums = np.zeros((3, len(genre.values)))
    for row, values in enumerate(of_item[: split.num_trained_items]):
        sums[:, values] += np.array([[events[row]], [liked[row]], [1.0]])
    popular, share = sums[0] / np.maximum(sums[2], 1), sums[1] / np.maximum(sums[0], 1)
    return _Genres(
        *(np.array([of[v].mean() if v else 0.0 for v in of_item]) for of in (popular, share))
    )


def _chosen(log: InteractionLog, targets: Sequence[NextItem], first: int, scores: F64) -> F64:
    """Compute the share of cold items, new to the user, below each target; ties count half."""
    found = np.empty(len(targets))
    for index, (user, event) in enumerate(targets):
        row = scores[index]
        had = log.items[log.starts[user] : log.starts[user + 1]]
        others = np.delete(row, np.unique(had[had >= first]) - first)
        own = row[log.items[event] - first]
        found[index] = ((others < own).sum() + (others == own).sum() / 2) / len(others)
    return found


def _ranks(
    log: InteractionLog,
    lists: Sequence[ItemList],
    targets: Sequence[NextItem],
    scores_of: Callable[[ItemList], np.ndarray],
) -> F64:
    """Rank each target in its list, without the history's items; inf = it was not found."""
    ranks = np.full(len(targets), np.inf)
    for index, (found, (user, event)) in enumerate(zip(lists, targets, strict=True)):
        own = log.items[event]
        history = log.items[log.starts[user] : event]
        scores = scores_of(found)[~np.isin(found.items, history[history != own])]
        mine = scores_of(found)[found.items == own]
        if len(mine):
            ranks[index] = (scores > mine).sum() + ((scores == mine).sum() - 1) / 2
    return ranks


def _generated(split: ColdLog, options: GenerateOptions, targets: Sequence[NextItem]) -> F64:
    """Rank each target by a generator's beams, with the cold items in its catalogue."""
    log = split.evaluated
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "codes.json"
        path.write_text(codes_text(log.item_ids[: split.num_trained_items], split.codes))
        # a cold item has no node of its own
        options = msgspec.structs.replace(options, given_tokens="codes")
        made = train_generator(split.trained, split.features, options, path)
    codes = replace(split.all_codes, code_count=made.codes.code_count)
    evaluator = GeneratorEvaluator(codes, log.item_ids, options.history_items, options.beam_width)
    return evaluator.evaluate(made.model, log, targets, unseen=True).ranks.unseen


def _auc_line(
    case: str, baseline: str, ours: F64, theirs: F64, labels: np.ndarray, users: I64
) -> Line:
    found = difference_of_auc(ours, theirs, labels, users)
    value, base = auc(ours, labels), auc(theirs, labels)
    ok = value >= max(LEAST_AUC, base + LEAST_GAIN)
    return _line(case, "AUC", value, baseline, base, found, ok)


def _warm_line(case: str, ours: F64, theirs: F64, labels: np.ndarray, users: I64) -> Line:
    found = difference_of_auc(ours, theirs, labels, users)
    value, base = auc(ours, labels), auc(theirs, labels)
    return _line(case, "AUC", value, "without row dropout", base, found, value >= base - MOST_LOSS)


def _chosen_line(case: str, baseline: str, ours: F64, theirs: F64) -> Line:
    value, base = float(ours.mean()), float(theirs.mean())
    ok = value >= max(LEAST_AUC, base + LEAST_GAIN)
    return _line(case, "AUC", value, baseline, base, difference_of_users(ours, theirs), ok)


def _hits_line(case: str, ours: F64, theirs: F64) -> Line:
    value, base = float(ours.mean()), float(theirs.mean())
    found = difference_of_users(ours, theirs)
    return _line(
        case,
        case.rpartition(" ")[2],
        value,
        "train generate",
        base,
        found,
        value >= LEAST_HITS * base,
    )


def _line(
    case: str,
    unit: str,
    value: float,
    baseline: str,
    base: float,
    found: Difference | None,
    ok: bool,
) -> Line:
    return Line(
        bench="quality",
        case=f"{case}, {baseline}",
        ours=value,
        unit=unit,
        baseline=baseline,
        baseline_value=base,
        ratio=value / base if base else float("inf"),
        target=None,
        ok=ok,
        low=None if found is None else found.low,
        high=None if found is None else found.high,
    )


class ColdLog(NamedTuple):
    """A log with cold items. Item rows: the trained items, then the cold ones."""

    trained: Interactions
    features: list[ItemValues]  # features of the trained items
    evaluated: InteractionLog  # all events; the newest fifth of each user is evaluated
    num_trained_items: int
    codes: ItemCodes  # codes of the trained items
    all_codes: ItemCodes  # codes of all items
    new: NewItems  # features of the cold items, for the ranker


def cold_log(
    interactions: Interactions, features: Sequence[ItemValues], options: GenerateOptions, seed: int
) -> ColdLog:
    """Remove a tenth of the items from a log, and make the codes of all items."""
    item_ids = np.unique(interactions.items)
    random = np.random.default_rng(seed)
    cold = np.sort(random.choice(item_ids, int(COLD_RATIO * len(item_ids)), replace=False))
    older = to_train_on(interactions.users, interactions.timestamps, "user-time")
    trained = interactions[older & ~np.isin(interactions.items, cold)]
    warm_ids = np.unique(trained.items)
    known = np.concatenate([warm_ids, cold])
    everything = interactions[np.isin(interactions.items, known)]
    warm = [_of(feature, warm_ids) for feature in features]

    # includes the features of the cold items
    log = build_log(trained, [_of(feature, known) for feature in features], SPLIT)
    vectors = item_vectors(
        log.only_trained(SPLIT), features, options.vector_dim, COOCCURRENCE_WINDOW, options.seed
    )
    is_cold = np.isin(log.item_ids, cold)
    uses = np.bincount(log.items[log.trained], minlength=log.num_items)[~is_cold]
    codes = residual_codes(vectors[~is_cold], options.code_count, uses, options.seed)
    new_codes = codes_of_new(codes, vectors[~is_cold], vectors[is_cold])
    return ColdLog(
        trained,
        warm,
        _evaluated(everything, known),
        len(warm_ids),
        codes,
        replace(codes, sids=np.concatenate([codes.sids, new_codes])),
        NewItems(
            tuple(_value_ids(_of(f, warm_ids), f, cold) for f in features),
            np.empty((len(cold), 0), np.int32),
        ),
    )


def _of(feature: ItemValues, item_ids: I64) -> ItemValues:
    kept = set(item_ids.tolist())
    return ItemValues(
        feature.name,
        feature.values,
        {item: v for item, v in feature.of_item.items() if item in kept},
    )


def _value_ids(trained: ItemValues, feature: ItemValues, item_ids: I64) -> I64:
    """Return the new items' value ids, cut to the width of the trained items' table."""
    width = max(1, *(len(values) for values in trained.of_item.values()))
    table = np.full((len(item_ids), width), len(feature.values))
    for row, item in enumerate(item_ids.tolist()):
        values = feature.of_item.get(item, [])[:width]
        table[row, : len(values)] = values
    return table


def _evaluated(interactions: Interactions, item_ids: I64) -> InteractionLog:
    log = build_log(interactions, [], "user-time")
    order = np.argsort(item_ids)
    return replace(
        log,
        items=order[np.searchsorted(item_ids[order], log.item_ids[log.items])],
        item_ids=item_ids,
    )


def with_new_items(model: HSTU, new: NewItems) -> HSTU:
    """Extend a ranker by new items with zero residual rows."""
    count = len(new.codes)
    config = msgspec.structs.replace(model.config, num_items=model.config.num_items + count)
    wide = HSTU(config).cast(model.dtype)
    state = model.state_dict()
    state["item.weight"] = torch.cat(
        [state["item.weight"], torch.zeros(count, config.dim, dtype=model.dtype)]
    )
    for index, values in enumerate(new.features):
        name = f"feature_ids_{index}"
        state[name] = torch.cat([state[name], torch.from_numpy(values)])
    if config.item_codes:
        state["codes.of_item"] = torch.cat([state["codes.of_item"], torch.from_numpy(new.codes)])
    wide.load_state_dict(state)
    wide.eval().items.freeze()
    return wide
