"""The click of an impression log against gradient-boosted trees on the same columns.

A planted log: a user has a taste, an item an appeal and a kind, a page shows ten items, and a click
depends on taste, appeal and the place on the page. The trees (LightGBM, which is not a dependency
of npu_gr: `pip install lightgbm`) get what a feature pipeline would make of the columns user, item,
time, place and click: see `COLUMNS`. Counts are those before the row's time, held-out events
included, which the ranker has not: that favours the trees. Both sides are evaluated on the same
rows, without the place.

n = rows: the clicked and the other shown items.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.frame import Line
from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError
from npu_gr.history_store.interactions import Impressions, Interactions
from npu_gr.train.data import InteractionLog, build_log
from npu_gr.train.metrics import F64, auc, difference_of_auc
from npu_gr.train.rank.options import TrainOptions
from npu_gr.train.rank.train import train_rank

Bools = npt.NDArray[np.bool_]
# (columns, whether clicked) of the training, the same of the validation, columns of the test ->
# scores of the test
Boost = Callable[[F64, Bools, F64, Bools, F64], F64]
COLUMNS = (
    *("item", "place", "clicks of the item", "times it was shown", "its rate", "user's clicks"),
    *("times the user was shown something", "the user's rate", "user's clicks of the item"),
    *("seconds since the last event", "last item", "highest cosine", "mean cosine"),
)
ITEM, PLACE, LAST = COLUMNS.index("item"), COLUMNS.index("place"), COLUMNS.index("last item")
RECENT = 20  # events whose items are compared with the shown one
PRIOR = 10.0  # events by which a rate is smoothed
PAGE, KINDS = 10, 8
START_S = 1_700_000_000


class Rows(NamedTuple):
    """Shown items in time order."""

    events: I64  # [n] the event just before which it was shown; its earlier events are the history
    items: I64  # [n]
    places: I64  # [n] place on the page, from 0
    clicked: Bools  # [n]
    trained: Bools  # [n]


def shown_lines(
    seeds: tuple[int, ...], rank: TrainOptions, boost: Boost, num_users: int, num_items: int
) -> Iterator[Line]:
    """Yield a line for each seed: AUC of the click, with the interval of the difference.

    Args:
        seeds: Seeds of the log and of the models.
        rank: Options of the ranker.
        boost: Trains the trees.
        num_users: Users of the planted log.
        num_items: Items of it.
    """
    for seed in seeds:
        interactions = planted_pages(seed, num_users, num_items)
        options = msgspec.structs.replace(rank, split="user-time", seed=seed)
        found = train_rank(interactions, [], options)[1].shown
        assert found is not None
        log = build_log(interactions, [], options.split)
        rows = rows_of(log)
        columns = columns_of(log, rows)
        theirs = boosted(columns, rows, boost)
        tested = ~rows.trained
        # both in one order; an item that was shown twice before an event has equal columns
        theirs = theirs[_order(rows.events[tested], rows.items[tested], rows.clicked[tested])]
        order = _order(found.events, found.items, found.labels)
        ours, labels = found.logits[order, 0], found.labels[order]
        gap = difference_of_auc(ours, theirs, labels, found.users[order])
        assert gap is not None
        value, baseline = auc(ours, labels), auc(theirs, labels)
        yield Line(
            bench="quality",
            case=f"shown, planted, {len(rows.items):,} rows, seed {seed}: click, AUC",
            ours=value,
            unit="AUC",
            baseline="gradient-boosted trees",
            baseline_value=baseline,
            ratio=value / baseline,
            target=1.0,
            ok=gap.high >= 0,
            low=gap.low,
            high=gap.high,
        )


def _order(events: I64, items: I64, clicked: Bools) -> I64:
    return np.lexsort((clicked, items, events))


def planted_pages(seed: int, num_users: int, num_items: int) -> Interactions:
    """Draw pages, whose items a user clicks by taste, appeal and place; popular items are shown."""
    random = np.random.default_rng(seed)
    kind = random.integers(KINDS, size=num_items)
    appeal = random.normal(0.0, 0.8, num_items)
    often = np.arange(1, num_items + 1) ** -0.7
    cumulated = np.cumsum(often / often.sum())
    columns: list[tuple[int, int, int, int, bool]] = []  # user, item, second, place, clicked
    for user in range(num_users):
        taste = random.normal(0.0, 1.2, KINDS)
        for page in range(int(random.integers(6, 20))):
            drawn = np.unique(np.searchsorted(cumulated, random.random(2 * PAGE)))
            shown = random.permutation(drawn)[:PAGE]
            logits = taste[kind[shown]] + appeal[shown] - 0.15 * np.arange(len(shown)) - 1.0
            clicked = random.random(len(shown)) < 1 / (1 + np.exp(-logits))
            at_s = START_S + page * 7200 + int(random.integers(3600))
            for place, (item, is_clicked) in enumerate(
                zip(shown.tolist(), clicked.tolist(), strict=True)
            ):
                columns.append((user, item, at_s, place, is_clicked))
    columns.sort(key=lambda row: row[2])
    table = np.array(columns, np.int64)
    clicks, others = table[table[:, 4] == 1], table[table[:, 4] == 0]
    return Interactions(
        clicks[:, 0].astype(np.int32),
        clicks[:, 1],
        np.zeros(len(clicks)),
        clicks[:, 2],
        [f"u{user}" for user in range(num_users)],
        ("click",),
        (),
        Impressions(
            others[:, 0].astype(np.int32),
            others[:, 1],
            others[:, 2],
            others[:, 3].astype(np.int16),
            clicks[:, 3].astype(np.int16),
        ),
    )


def rows_of(log: InteractionLog) -> Rows:
    """List the clicked and the other shown items of a log with places, in time order."""
    shown = log.shown
    assert shown is not None
    own = np.flatnonzero(shown.of_events >= 0)
    events = np.concatenate([own, shown.events])
    items = np.concatenate([log.items[own], shown.items])
    places = np.concatenate([shown.of_events[own], shown.positions])
    clicked = np.arange(len(events)) < len(own)
    order = np.argsort(log.times[events], kind="stable")
    events = events[order]
    return Rows(events, items[order], places[order], clicked[order], log.trained[events])


def columns_of(log: InteractionLog, rows: Rows) -> F64:
    """Compute the columns of the trees, float64 [n, COLUMNS].

    A row reads what happened before its time, never its own click or others of that time.
    """
    users = log.users[rows.events]
    times = log.times[rows.events]
    cosine = _cosines(log)
    found = np.empty((len(users), len(COLUMNS)))
    of_item = np.zeros((log.num_items, 2))  # shown, clicked
    of_user = np.zeros((log.num_users, 2))
    own: dict[tuple[int, int], int] = {}
    for begin, end in _equal(times):
        part = slice(begin, end)
        for row in range(begin, end):
            user, item, event = int(users[row]), int(rows.items[row]), int(rows.events[row])
            first = int(log.starts[user])
            # events of the same second are no history
            last = first + int(np.searchsorted(log.times[first:event], times[row]))
            recent = log.items[max(first, last - RECENT) : last]
            near = cosine[item, recent] if len(recent) else np.zeros(1)
            item_shown, item_clicked = of_item[item]
            user_shown, user_clicked = of_user[user]
            found[row] = (
                item,
                rows.places[row],
                item_clicked,
                item_shown,
                item_clicked / (item_shown + PRIOR),
                user_clicked,
                user_shown,
                user_clicked / (user_shown + PRIOR),
                own.get((user, item), 0),
                times[row] - log.times[last - 1] if last > first else -1,
                log.items[last - 1] if last > first else -1,
                near.max(),
                near.mean(),
            )
        clicked = rows.clicked[part].astype(np.float64)
        for counts, keys in ((of_item, rows.items[part]), (of_user, users[part])):
            np.add.at(counts, keys, np.stack([np.ones(end - begin), clicked], 1))
        for row in range(begin, end):
            if rows.clicked[row]:
                pair = int(users[row]), int(rows.items[row])
                own[pair] = own.get(pair, 0) + 1
    return found


def _equal(times: I64) -> Iterator[tuple[int, int]]:
    """Yield the begin and the end of each run of equal times."""
    edges = np.flatnonzero(np.diff(times, prepend=times[0] - 1, append=times[-1] + 1))
    yield from zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)


def _cosines(log: InteractionLog) -> F64:
    """Compute the cosine of the users of each two items, by trained events: [items, items]."""
    seen = np.zeros((log.num_users, log.num_items))
    seen[log.users[log.trained], log.items[log.trained]] = 1
    lengths = np.sqrt(seen.sum(0)).clip(min=1)
    cosine: F64 = (seen / lengths).T @ (seen / lengths)
    np.fill_diagonal(cosine, 0)
    return cosine


def boosted(columns: F64, rows: Rows, boost: Boost) -> F64:
    """Score the tested rows by trees; the last tenth of the trained rows ends their training."""
    trained = np.flatnonzero(rows.trained)
    fitted, held = np.split(trained, [len(trained) * 9 // 10])
    tested = columns[~rows.trained].copy()
    tested[:, PLACE] = 0
    return boost(
        *(columns[fitted], rows.clicked[fitted]), *(columns[held], rows.clicked[held]), tested
    )


def lightgbm() -> Boost:
    """Load LightGBM.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        library: Any = importlib.import_module("lightgbm")
    except ImportError as error:
        raise ConfigError(
            f"bench quality --only shown: needs lightgbm (pip install lightgbm): {error}"
        ) from error

    def boost(columns: F64, clicked: Bools, held: F64, held_clicked: Bools, tested: F64) -> F64:
        fitted = library.Dataset(columns, clicked, categorical_feature=[ITEM, LAST])
        options = {"objective": "binary", "metric": "auc", "learning_rate": 0.05}
        options |= {"num_leaves": 31, "min_data_in_leaf": 50, "verbose": -1, "num_threads": 1}
        model = library.train(
            options,
            fitted,
            num_boost_round=1000,
            valid_sets=[library.Dataset(held, held_clicked, reference=fitted)],
            callbacks=[library.early_stopping(50, verbose=False)],
        )
        scores: F64 = model.predict(tested)
        return scores

    return boost
