"""Count the neighbours of each item by the cosine: what the same users have.

And by the other kinds below.

    similarity(j, i) = (sum over the users v who have both of n_v^-1/2) / (sqrt(n_j n_i) + 20)

n are the users of an item, and the items of a user. It is a cosine, shrunk: what two users share by
chance, of items that nobody else has, would else be as good as what hundreds share. Chosen on the
validation of Amazon Beauty. There the NDCG@10 of the neighbours alone rises with the shrink (.045
of 0, .052 of 10, .054 of 20, .057 of 40), and what they add to the order's likelihood falls (.068
nats an event of 10, .061 of 20, .051 of 40). MovieLens tells none of these apart.

Source: ItemKNN (Deshpande and Karypis, TOIS 2004).

The kinds of neighbours that the validation chooses among: by which similarity, and of how many
events.

    cosine   shrunk, as it is counted above; of the last five events, or of 500
    EASE     what an item adds to another one by the linear autoencoder, where that is above 0; of 500 events
    summed   the cosines to all items of the history together, not their mean
    linear   the sum of EASE's weights themselves, those below 0 too: what EASE scores

A sum counts the more against popularity the more of the user is known; of a mean, thirty items say
no more than three. On logs with few events it is the best kind, and the validation of such a log
cannot tell: so it is the first one. The logarithm of a sum of EASE's weights above 0 is no kind: on
the validation of MovieLens it is worse than that of their mean (NDCG@10 .1302, .1365).

Where the order of events says much, five events say more than all. Where it says nothing all do,
and EASE does best on a log whose items have many events: it takes off what a pair has in common
through other items. There the weights below 0 matter: on the tests of six draws of 600 users of
MovieLens with their events shuffled the fitted order has .1777 of NDCG@10 with linear ones, .1647
with the mean, and EASE by itself .1799. On logs with few events the mean is better. 500 events,
because a request reads so many rows; with 100 EASE loses .004 to .006 of NDCG@10 on such logs.
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
USER_EXPONENT = 0.5  # a user who has many items tells less of each
# of a user that count at most, those that were had last: their pairs grow with the square
USER_ITEMS = 500
MAX_PAIRS = 1 << 30  # of all users, some minutes: of a larger log fewer items of a user count
PAIRS_AT_ONCE = 1 << 22


def count_neighbours(log: InteractionLog) -> Neighbours:
    """Count the neighbours in the trained events.

    Args:
        log: its trained events count.
    """
    users, items = _had(log)
    of_item = np.bincount(items, minlength=log.num_items)
    best = []
    for shared in _shared(users, items, of_item):
        norms = np.sqrt(of_item[shared.rows] * of_item[shared.columns]) + SHRINK
        best.append(shared._replace(values=shared.values / norms).best_of_rows(MAX_NEIGHBOURS))
    return Neighbours(*joined(best).table(log.num_items, 0.0))


def _had(log: InteractionLog) -> tuple[I64, I64]:
    """List users and their items, each pair once, by users.

    Of a user with too many items those that were had last.
    """
    newest_first = np.flatnonzero(log.trained)[::-1]
    pairs = log.users[newest_first] * log.num_items + log.items[newest_first]
    # the last event of each pair
    once = newest_first[np.sort(np.unique(pairs, return_index=True)[1])][::-1]
    users = log.users[once]
    # of the user, from this one on
    left = np.searchsorted(users, users, "right") - np.arange(len(users))
    kept = once[left <= _items_of_a_user(np.bincount(users))]
    return log.users[kept], log.items[kept]


def _items_of_a_user(of_user: I64) -> int:
    """Choose how many items of a user count: at most `USER_ITEMS`, and no more pairs than `MAX_PAIRS` if that can be.

    Args:
        of_user: [users] items of each.
    """
    most = USER_ITEMS
    while most > 2 and (np.minimum(of_user, most).astype(np.float64) ** 2).sum() > MAX_PAIRS:
        most //= 2
    return most


def _shared(users: I64, items: I64, of_item: I64) -> Iterator[Entries]:
    """Sum up, for some items at a time, the weights of the users whom they share with each other item.

    Args:
        users, items: [n] as of `_had`.
        of_item: [num_items] users of each.
    """
    of_user = np.bincount(users)
    weights = np.maximum(of_user, 1) ** -USER_EXPONENT
    begins = np.cumsum(of_user) - of_user  # of each user's items
    by_item = np.argsort(items, kind="stable")
    num_items = len(of_item)
    ends = np.cumsum(of_item)  # of each item's users, in `by_item`
    pairs = np.cumsum(np.concatenate([[0], of_user[users[by_item]]]))  # that the users before make
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
    """Entries of a matrix, each pair of row and column at most once. n = entries."""

    rows: I64  # [n]
    columns: I64  # [n]
    values: F64  # [n]

    def best_of_rows(self, most: int) -> Entries:
        """Keep the highest entries of each row, of equals the lower columns.

        Sorted by rows, then by columns.
        """
        best_first = np.lexsort((self.columns, -self.values, self.rows))
        ascending = self.rows[best_first]
        place = np.arange(len(ascending)) - np.searchsorted(ascending, ascending)
        chosen = best_first[place < most]
        kept = chosen[np.lexsort((self.columns[chosen], self.rows[chosen]))]
        return Entries(self.rows[kept], self.columns[kept], self.values[kept])

    def table(self, num_rows: int, padding: float) -> tuple[I32, F32]:
        """Write sorted entries as a table.

        Args:
            num_rows: of the table.
            padding: value where there is no entry.

        Returns:
            Columns int32 [num_rows, width], -1 = padding, which comes first; and their values
            float32 [num_rows, width]. The width is that of the longest row.
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
    """Join matrices of different rows, at least one; sorted as they stand."""
    rows, columns, values = (np.concatenate(one) for one in zip(*parts, strict=True))
    return Entries(rows, columns, values)


MANY_ITEMS = 500  # events that are read where the order of events says little
MANY_NEIGHBOURS = 500  # of an item that are kept, where that is not too much for all items together
MAX_KEPT = 1 << 23  # neighbours of all items together: 64 MiB


def linear_neighbours(weights: Callable[[int, int], F32], num_items: int) -> Neighbours:
    """Keep the strongest weights of each row, whatever their sign.

    Args:
        weights: (start, stop) -> what these items add to every one, 0 to themselves: float32 [stop
            - start, num_items].
        num_items: of the catalogue.
    """
    most = min(MANY_NEIGHBOURS, max(MAX_NEIGHBOURS, MAX_KEPT // num_items))
    best = []
    for start in range(0, num_items, BLOCK_ROWS):
        found = weights(start, min(start + BLOCK_ROWS, num_items))
        strength = np.abs(found)
        if most < num_items:  # only these are sorted
            strength[strength < np.partition(strength, -most, axis=1)[:, -most, None]] = 0
        rows, columns = np.nonzero(strength)
        kept = Entries(rows, columns, strength[rows, columns].astype(np.float64)).best_of_rows(most)
        values = found[kept.rows, kept.columns].astype(np.float64)
        best.append(Entries(kept.rows + start, kept.columns, values))
    return Neighbours(
        *joined(best).table(num_items, 0.0), MANY_ITEMS, is_summed=True, is_linear=True
    )


class NeighbourKind(NamedTuple):
    """A way to count neighbours."""

    last_items: int  # events of a history that are read
    ridge: float | None = None  # of EASE; None = the cosine
    is_summed: bool = False  # whether the sum of the similarities counts, not their mean
    is_linear: bool = False  # whether this sum itself counts, of EASE's weights below 0 too

    @property
    def name(self) -> str:
        """In words."""
        similarity = "cosine" if self.ridge is None else f"EASE, ridge {self.ridge:g}"
        how = "linear" if self.is_linear else "summed" if self.is_summed else ""
        return ", ".join(filter(None, (similarity, f"last {self.last_items}", how)))

    @property
    def num_neighbours(self) -> int:
        """Of an item, which a request reads for each of its events.

        A large catalogue has fewer linear ones.
        """
        return MANY_NEIGHBOURS if self.is_linear else MAX_NEIGHBOURS

    def counted(self, log: InteractionLog) -> Neighbours:
        """Count the neighbours in the trained events of a log.

        Raises:
            DataError: the log is too large for EASE.
        """
        return self._read(_similarities(log, self.ridge), log.num_items)

    def _read(self, similarities: Neighbours | EASE, num_items: int) -> Neighbours:
        """Read the similarities as this kind does."""
        if isinstance(similarities, Neighbours):
            found = similarities
        elif self.is_linear:
            found = linear_neighbours(partial(_rows, similarities), num_items)
        else:
            found = ease_neighbours(similarities, num_items)
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
"""The one first that is taken where the validation cannot tell."""


def count_kinds(log: InteractionLog) -> dict[NeighbourKind, Neighbours]:
    """Count the neighbours of every kind in the trained events, each similarity once.

    The usual kind comes first.
    """
    counted: dict[NeighbourKind, Neighbours] = {}
    for ridge, kinds in groupby(_kinds_of(log), key=lambda kind: kind.ridge):
        counted |= _of_ridge(log, ridge, kinds)
    return counted


def _of_ridge(
    log: InteractionLog, ridge: float | None, kinds: Iterable[NeighbourKind]
) -> dict[NeighbourKind, Neighbours]:
    """Count the kinds of one similarity; EASE's matrix, up to half a gigabyte, is gone before the next one is made."""
    similarities = _similarities(log, ridge)
    return {kind: kind._read(similarities, log.num_items) for kind in kinds}


def _kinds_of(log: InteractionLog) -> Sequence[NeighbourKind]:
    """List the kinds that can be counted in a log of this size, its untrained events included: all will be trained."""
    whole = graph_of(log.all_trained())
    if len(whole.users) > MAX_EDGES or ease_is_too_large(whole) is not None:
        return [kind for kind in KINDS if kind.ridge is None]
    return KINDS


def _similarities(log: InteractionLog, ridge: float | None) -> Neighbours | EASE:
    """Count the cosines in the trained events; with a ridge, EASE.

    Raises DataError: the log is too large for it.
    """
    return count_neighbours(log) if ridge is None else EASE(graph_of(log), log.num_items, ridge)


def ease_neighbours(model: EASE, num_items: int) -> Neighbours:
    """Keep the highest weights above 0 of each item's row of B.

    Args:
        model: of all items.
        num_items: of the catalogue.
    """
    best = []
    for start in range(0, num_items, BLOCK_ROWS):
        weights = _rows(model, start, min(start + BLOCK_ROWS, num_items))
        rows, columns = np.nonzero(weights > 0)
        found = Entries(rows + start, columns, weights[rows, columns].astype(np.float64))
        best.append(found.best_of_rows(MAX_NEIGHBOURS))
    return Neighbours(*joined(best).table(num_items, 0.0))


def _rows(model: EASE, start: int, stop: int) -> F32:
    rows: F32 = model.weights(start, stop).numpy()
    return rows
