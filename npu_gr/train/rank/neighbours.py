"""Count the neighbours of each item: the items that the same users have.

    similarity(j, i) = (users who have both) / (sqrt(n_j n_i) + shrink),   n = users who have it
"""

from __future__ import annotations

import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.model.neighbours import MAX_NEIGHBOURS, Neighbours
from npu_gr.train.data import InteractionLog
from npu_gr.train.metrics import F64
from npu_gr.train.rank.best_of_rows import best_of_rows

SHRINK = 20.0
USER_EXPONENT = 0.5
USER_ITEMS = 500  # newest items of a user that count: their pairs grow with the square
_PAIRS_AT_ONCE = 1 << 22


def count_neighbours(log: InteractionLog) -> Neighbours:
    """Count the neighbours in the trained events.

    Args:
        log: its trained events count.
    """
    num_items = log.num_items
    users, items = _newest(log)
    of_item = np.bincount(items, minlength=num_items)
    of_user = np.bincount(users, minlength=log.num_users)
    weight = np.maximum(of_user, 1) ** -USER_EXPONENT
    begins = np.cumsum(of_user) - of_user
    by_item = np.argsort(items, kind="stable")
    lengths = of_user[users[by_item]]  # pairs that each edge makes
    pairs = np.concatenate([[0], np.cumsum(lengths)])
    ends = np.cumsum(of_item)
    tables = []
    start = 0
    parts: list[tuple[I64, I64, F64]] = []
    while start < num_items:
        first = int(ends[start] - of_item[start])
        stop = max(start + 1, int(np.searchsorted(pairs[ends], pairs[first] + _PAIRS_AT_ONCE, "right")))
        edges = by_item[first : ends[stop - 1]]
        own = lengths[first : ends[stop - 1]]
        within = np.arange(own.sum()) - np.repeat(np.cumsum(own) - own, own)
        other = items[np.repeat(begins[users[edges]], own) + within]
        source = np.repeat(items[edges], own)
        keys, place = np.unique((source - start) * num_items + other, return_inverse=True)
        shared = np.bincount(place, np.repeat(weight[users[edges]], own), len(keys))
        row, column = np.divmod(keys, num_items)
        is_other = row + start != column
        row, column, shared = row[is_other], column[is_other], shared[is_other]
        value = shared / (np.sqrt(of_item[row + start] * of_item[column]) + SHRINK)
        best = np.lexsort((column, -value, row))
        nth = np.arange(len(row)) - np.searchsorted(row[best], row[best])
        kept = best[nth < MAX_NEIGHBOURS]
        parts.append((row[kept] + start, column[kept], value[kept]))
        start = stop
    source, target, value = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Neighbours(*best_of_rows(source, target, value, num_items, MAX_NEIGHBOURS, 0.0))


def _newest(log: InteractionLog) -> tuple[I64, I64]:
    """List users and items, each pair once, sorted by user: of each user the items that were had last."""
    newest_first = np.flatnonzero(log.trained)[::-1]
    users, items = log.users[newest_first], log.items[newest_first]
    once = np.sort(np.unique(users * log.num_items + items, return_index=True)[1])[::-1]  # oldest first again
    users, items = users[once], items[once]
    from_end = np.searchsorted(users, users, "right") - 1 - np.arange(len(users))
    kept = from_end < USER_ITEMS
    return users[kept], items[kept]
