"""Compute the neighbours of each item: items that the same users have.

The similarity is a shrunk cosine

    similarity(j, i) = (sum over the users v who have both of  n_v^-1/2) / (sqrt(n_j n_i) + 20)

or a weight of EASE (a linear autoencoder, `train/linear.py`). n_j is the number of users of item j,
n_v the number of items of user v. Without the shrinkage of 20, two rare items that share one user
by chance would be as similar as two items that share hundreds.

The validation chooses one of these kinds of neighbours (`KINDS`):

    cosine   mean of the cosines to the items of the last 5 events, or of the last 500
    summed   sum of the cosines to the items of the last 500 events
    EASE     mean of EASE's positive weights to the items of the last 500 events
    linear   sum of all of EASE's weights, also negative ones: EASE's own score

Why these kinds and constants:

- A sum grows with the history, so it outweighs popularity for users with many events; a mean does
  not. "summed" is the best kind on logs with few events, whose validation is too small to tell. So
  it is the first kind, which stays if no other is better.
- Five events are better where the order of events matters (the next item depends on the last ones),
  500 events where it does not. There EASE is best on logs with many events per item, because it
  removes similarity that is explained by other items.
- Negative weights matter there too: on six samples of 600 MovieLens users with shuffled events, the
  test NDCG@10 of the fitted blend is .1777 with "linear" and .1647 with "EASE"; EASE alone has
  .1799. On logs with few events the mean is better.
- The log of a sum of positive EASE weights is worse than the log of their mean on the validation of
  MovieLens (NDCG@10 .1302 against .1365), so it is not a kind.
- With the last 100 events instead of 500, EASE loses .004 to .006 of NDCG@10 on such logs.
- The shrinkage was chosen on the validation of Amazon Beauty. A larger one raises the NDCG@10 of
  the neighbours alone (0: .045, 10: .052, 20: .054, 40: .057), but lowers what they add to the
  blend's likelihood (10: .068 nats per event, 20: .061, 40: .051). On MovieLens there is no
  difference.

Source: ItemKNN (Deshpande and Karypis, TOIS 2004).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import F32, I64
from npu_gr.model.item_similarity import LAST_ITEMS, MAX_NEIGHBOURS, Neighbours
from npu_gr.train.baselines import MAX_EDGES, graph_of
from npu_gr.train.data import InteractionLog
from npu_gr.train.linear import BLOCK_ROWS, EASE, ease_is_too_large
from npu_gr.train.metrics import F64

SHRINK = 20.0
USER_EXPONENT = 0.5  # a user with many items is weaker evidence for each pair
USER_ITEMS = 500  # most items of a user, the latest ones: the number of pairs grows with the square
MAX_PAIRS = 1 << 30  # most pairs of all users (minutes); larger logs use fewer items per user
PAIRS_AT_ONCE = 1 << 22


def count_neighbours(log: InteractionLog) -> Neighbours:
    """Compute the shrunk cosines of the trained events, and keep the best of each item."""
    users, items = _had(log)
    of_item = np.bincount(items, minlength=log.num_items)
    best = []
    for shared in _shared(users, items, of_item):
        norms = np.sqrt(of_item[shared.rows] * of_item[shared.columns]) + SHRINK
        best.append(shared._replace(values=shared.values / norms).best_of_rows(MAX_NEIGHBOURS))
    return Neighbours(*joined(best).table(log.num_items, 0.0))


def _had(log: InteractionLog) -> tuple[I64, I64]:
    """List the distinct pairs of user and item, sorted by user.

    Users with too many items keep the latest ones.
    """
    newest_first = np.flatnonzero(log.trained)[::-1]
    pairs = log.users[newest_first] * log.num_items + log.items[newest_first]
    # the latest event of each pair
    once = newest_first[np.sort(np.unique(pairs, return_index=True)[1])][::-1]
    users = log.users[once]
    # number of the user's pairs from this one on
    left = np.searchsorted(users, users, "right") - np.arange(len(users))
    kept = once[left <= _items_of_a_user(np.bincount(users))]
    return log.users[kept], log.items[kept]


def _items_of_a_user(of_user: I64) -> int:
    """Choose the most items of a user: at most `USER_ITEMS`, halved until all pairs fit.

    The pairs of all users should be at most `MAX_PAIRS`; a user keeps at least two items.

    Args:
        of_user: int64 [users] number of items of each user.
    """
    most = USER_ITEMS
    while most > 2 and (np.minimum(of_user, most).astype(np.float64) ** 2).sum() > MAX_PAIRS:
        most //= 2
    return most


def _shared(users: I64, items: I64, of_item: I64) -> Iterator[Entries]:
    """Sum the weights of the users that each pair of items shares, a block of items at a time.

    Args:
        users: int64 [n] user of each pair, see `_had`.
        items: int64 [n] item of each pair.
        of_item: int64 [num_items] number of users of each item.
    """
    of_user = np.bincount(users)
    weights = np.maximum(of_user, 1) ** -USER_EXPONENT
    begins = np.cumsum(of_user) - of_user  # first pair of each user
    by_item = np.argsort(items, kind="stable")
    num_items = len(of_item)
    ends = np.cumsum(of_item)  # end of each item's users in `by_item`
    # number of item pairs that all earlier users in `by_item` make
    pairs = np.cumsum(np.concatenate([[0], of_user[users[by_item]]]))
    first = 0
    while first < num_items:
        begin = int(ends[first] - of_item[first])
        stop = max(
            first + 1, int(np.searchsorted(pairs[ends], pairs[begin] + PAIRS_AT_ONCE, "right"))
        )
        who = users[by_item[begin : ends[stop - 1]]]
        counts = of_user[who]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        own = np.repeat(items[by_item[begin : ends[stop - 1]]], counts)
        other = items[np.repeat(begins[who], counts) + within]
        is_other = own != other
        keys, place = np.unique((own * num_items + other)[is_other], return_inverse=True)
        summed = np.bincount(place, np.repeat(weights[who], counts)[is_other], len(keys)).astype(
            np.float64
        )
        yield Entries(*np.divmod(keys, num_items), summed)
        first = stop


I32 = npt.NDArray[np.int32]


class Entries(NamedTuple):
    """Entries of a sparse matrix with distinct (row, column) pairs. n = entries."""

    rows: I64  # [n]
    columns: I64  # [n]
    values: F64  # [n]

    def best_of_rows(self, most: int) -> Entries:
        """Keep the highest entries of each row, sorted by rows, then by columns.

        Ties go to the lower column.
        """
        best_first = np.lexsort((self.columns, -self.values, self.rows))
        ascending = self.rows[best_first]
        place = np.arange(len(ascending)) - np.searchsorted(ascending, ascending)
        chosen = best_first[place < most]
        kept = chosen[np.lexsort((self.columns[chosen], self.rows[chosen]))]
        return Entries(self.rows[kept], self.columns[kept], self.values[kept])

    def table(self, num_rows: int, padding: float) -> tuple[I32, F32]:
        """Convert sorted entries to a padded table, as wide as the longest row.

        Args:
            num_rows: Number of rows of the table.
            padding: Value of the padding.

        Returns:
            The columns int32 [num_rows, width], where -1 is padding and comes first, and their
            values float32 [num_rows, width].
        """
        of_row = np.bincount(self.rows, minlength=num_rows)
        width = int(of_row.max(initial=0))
        place = np.arange(len(self.rows)) - (np.cumsum(of_row) - width)[self.rows]
        columns = np.full((num_rows, width), -1, np.int32)
        columns[self.rows, place] = self.columns
        values = np.full((num_rows, width), padding, np.float32)
        values[self.rows, place] = self.values
        return columns, values


def joined(parts: list[Entries]) -> Entries:
    """Concatenate the entries of at least one matrix; the matrices have different rows."""
    rows, columns, values = (np.concatenate(one) for one in zip(*parts, strict=True))
    return Entries(rows, columns, values)


MANY_ITEMS = 500  # last events that a request reads, where the order of events matters little
MANY_NEIGHBOURS = 500  # most linear neighbours of an item
# most linear neighbours of all items (64 MiB); large catalogues keep fewer each
MAX_TABLE = 1 << 23


def linear_width(num_items: int) -> int:
    """Compute the most linear neighbours of an item, for a catalogue of so many items."""
    return min(MANY_NEIGHBOURS, max(MAX_NEIGHBOURS, MAX_TABLE // num_items))


def linear_neighbours(weights: Callable[[int, int], F32], num_items: int, most: int) -> Neighbours:
    """Keep the weights of each row with the largest absolute value.

    Args:
        weights: Function (start, stop) -> rows start .. stop - 1 of the item-item weights, float32
            [stop - start, num_items], with a zero diagonal.
        num_items: Number of items.
        most: Most neighbours of an item.
    """
    best = []
    for start in _blocks(num_items):
        found = weights(start, min(start + BLOCK_ROWS, num_items))
        strength = np.abs(found)
        if most < num_items:  # select before sorting
            strength[strength < np.partition(strength, -most, axis=1)[:, -most, None]] = 0
        rows, columns = np.nonzero(strength)
        kept = Entries(rows, columns, strength[rows, columns].astype(np.float64)).best_of_rows(most)
        values = found[kept.rows, kept.columns].astype(np.float64)
        best.append(Entries(kept.rows + start, kept.columns, values))
    return Neighbours(
        *joined(best).table(num_items, 0.0), MANY_ITEMS, is_summed=True, is_linear=True
    )


class NeighbourKind(NamedTuple):
    """A kind of neighbours; see the module."""

    last_items: int  # last events of a history that are read
    ridge: float | None = None  # EASE's ridge; None = the cosine
    is_summed: bool = False  # sum the similarities, instead of their mean
    is_linear: bool = False  # use the sum itself, with negative weights, instead of its logarithm

    @property
    def name(self) -> str:
        """Name in reports, e.g. "cosine, last 500, summed"."""
        similarity = "cosine" if self.ridge is None else f"EASE, ridge {self.ridge:g}"
        how = "linear" if self.is_linear else "summed" if self.is_summed else ""
        return ", ".join(filter(None, (similarity, f"last {self.last_items}", how)))

    @property
    def num_neighbours(self) -> int:
        """Most neighbours of an item, which a request reads for each event of its history."""
        return MANY_NEIGHBOURS if self.is_linear else MAX_NEIGHBOURS

    def counted(self, log: InteractionLog) -> Neighbours:
        """Count the neighbours in the trained events of a log.

        Raises:
            DataError: the log is too large for EASE.
        """
        return self._read(_similarities(log, self.ridge), log.num_items)

    def _read(self, similarities: Neighbours | FittedEASE, num_items: int) -> Neighbours:
        """Turn similarities into neighbours of this kind."""
        if isinstance(similarities, Neighbours):
            found = similarities
        else:
            model, rows = similarities
            if self.is_linear:
                weights = partial(_rows, model)
                found = linear_neighbours(weights, len(rows), linear_width(num_items))
            else:
                found = ease_neighbours(model, len(rows))
            found = spread(found, rows, num_items)
        return replace(found, last_items=self.last_items, is_summed=self.is_summed)


USUAL = NeighbourKind(MANY_ITEMS, is_summed=True)
KINDS = (
    USUAL,
    NeighbourKind(LAST_ITEMS),
    NeighbourKind(MANY_ITEMS),
    NeighbourKind(MANY_ITEMS, 100.0),
    NeighbourKind(MANY_ITEMS, 100.0, is_summed=True, is_linear=True),
    NeighbourKind(MANY_ITEMS, 1000.0),
)
"""The first kind is used if the validation shows no other to be better."""


def count_kinds(
    log: InteractionLog, done: Callable[[int, int], None] = lambda *_: None
) -> dict[NeighbourKind, Neighbours]:
    """Compute the neighbours of every kind that fits the log's size, `USUAL` first.

    Kinds with the same similarity share its computation.

    Args:
        log: Log whose trained events are counted.
        done: Callback (kinds that are counted, all kinds), before the first one too.
    """
    counted: dict[NeighbourKind, Neighbours] = {}
    fitting = _kinds_of(log)
    done(0, len(fitting))
    for ridge, kinds in groupby(fitting, key=lambda kind: kind.ridge):
        counted |= _of_ridge(log, ridge, kinds)
        done(len(counted), len(fitting))
    return counted


def _of_ridge(
    log: InteractionLog, ridge: float | None, kinds: Iterable[NeighbourKind]
) -> dict[NeighbourKind, Neighbours]:
    """Compute the kinds of one similarity.

    A function of its own, so that EASE's matrix (up to 0.5 GB) is freed before the next one.
    """
    similarities = _similarities(log, ridge)
    return {kind: kind._read(similarities, log.num_items) for kind in kinds}


def _kinds_of(log: InteractionLog) -> Sequence[NeighbourKind]:
    """List the kinds for a log of this size.

    The size includes untrained events, because the refit trains on all of them.
    """
    graph, _ = graph_of(log.all_trained()).with_edges_only()
    if len(graph.users) > MAX_EDGES or ease_is_too_large(graph) is not None:
        return [kind for kind in KINDS if kind.ridge is None]
    return KINDS


class FittedEASE(NamedTuple):
    """EASE of the items that have events, which may be few of a long file of items.

    An item without an event has no weight, so what the others have is the same without it.
    """

    model: EASE
    rows: I64  # [its items] row of each of its items in the log, ascending


def _similarities(log: InteractionLog, ridge: float | None) -> Neighbours | FittedEASE:
    """Compute the cosines of the trained events, or with a ridge fit EASE.

    Raises:
        DataError: the log is too large for EASE.
    """
    if ridge is None:
        return count_neighbours(log)
    graph, rows = graph_of(log).with_edges_only()
    return FittedEASE(EASE(graph, graph.num_items, ridge), rows)


def spread(found: Neighbours, rows: I64, num_items: int) -> Neighbours:
    """Place the neighbours of some items in a table of all items; the others have none.

    Args:
        found: Neighbours of and among the items `rows`.
        rows: int64 [n] ascending.
        num_items: Number of items of the table.
    """
    shape = (num_items, found.items.shape[1])
    items, similarity = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    items[rows] = np.append(rows, -1)[found.items]  # -1, the padding, stays
    similarity[rows] = found.similarity
    return replace(found, items=items, similarity=similarity)


def _blocks(num_items: int) -> range:
    """List the first row of each block; no items are one empty block."""
    return range(0, max(1, num_items), BLOCK_ROWS)


def ease_neighbours(model: EASE, num_items: int) -> Neighbours:
    """Keep the highest positive weights of each item's row of EASE's B.

    Args:
        model: EASE, fitted with all items scored.
        num_items: Number of its items.
    """
    best = []
    for start in _blocks(num_items):
        weights = _rows(model, start, min(start + BLOCK_ROWS, num_items))
        rows, columns = np.nonzero(weights > 0)
        found = Entries(rows + start, columns, weights[rows, columns].astype(np.float64))
        best.append(found.best_of_rows(MAX_NEIGHBOURS))
    return Neighbours(*joined(best).table(num_items, 0.0))


def _rows(model: EASE, start: int, stop: int) -> F32:
    rows: F32 = model.weights(start, stop).numpy()
    return rows
