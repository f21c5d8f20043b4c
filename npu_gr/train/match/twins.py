"""Find twins: target items that have (nearly) the same users as a source item, most likely one product listed twice.

Who owns a source item has no use for its twin, and a test that asks for one measures the data's leak. So twins of what
a user owns are hidden when matches are served, and figures are printed with and without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import I64
from npu_gr.train.graph import Graph, unique_edges
from npu_gr.train.judge import HeldOut

MIN_JACCARD = 0.5  # of two items' users, but the one for whom it is asked
MIN_COMMON = 2  # users of both: one meeting of two rare items is no evidence
BLOCK_PAIRS = 4_000_000  # of a source and a target item of one user, held at once


class Twins(NamedTuple):
    """Pairs of a source and a target item, by source item. p = pairs."""

    source_items: I64  # [p] rows, ascending
    target_items: I64  # [p] rows


def find_twins(source: Graph, target: Graph) -> Twins:
    """Find the pairs.

    A user who has the source item and lacks the target item is in one of the two sets of users, and says nothing:

        users of both / (users of either - 1) >= MIN_JACCARD

    Args:
        source: all known edges.
        target: all known edges; a user has the same row in both.
    """
    of_source, of_target = source.degrees()[1], target.degrees()[1]
    found = [np.empty((2, 0), np.int64)]
    for pairs, common in _common_users(source, target):
        one, other = np.divmod(pairs, target.num_items)
        either = of_source[one] + of_target[other] - common
        is_twin = (common >= MIN_COMMON) & (common >= MIN_JACCARD * (either - 1))
        found.append(np.stack([one[is_twin], other[is_twin]]))
    joined = np.concatenate(found, axis=1)
    return Twins(*joined[:, np.lexsort((joined[1], joined[0]))])


def owned_twins(source: Graph, target: Graph, twins: Twins) -> Graph:
    """List, for each user, the target items that are twins of the user's source items."""
    starts = np.searchsorted(twins.source_items, source.items)
    counts = np.searchsorted(twins.source_items, source.items, "right") - starts
    places = np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
    users = np.repeat(source.users, counts)
    return unique_edges(users, twins.target_items[places], target.num_users, target.num_items)


def are_twins(held_out: HeldOut, owned: Graph) -> npt.NDArray[np.bool_]:
    """Whether each held-out item is a twin of what its user owns: bool [n]."""
    mine = held_out.users * owned.num_items + held_out.items
    return np.isin(mine, owned.users * owned.num_items + owned.items)


def _common_users(source: Graph, target: Graph) -> Iterator[tuple[I64, I64]]:
    """Count the users of both for every pair that has any, a range of source items at a time.

    Yields:
        source item * num_target_items + target item, and the count, both int64 [pairs].
    """
    by_user = np.argsort(target.users, kind="stable")
    starts = np.searchsorted(target.users[by_user], np.arange(target.num_users + 1))
    by_item = np.argsort(source.items, kind="stable")
    users, items = source.users[by_item], source.items[by_item]
    counts = (starts[1:] - starts[:-1])[users]
    blocks = np.cumsum(counts) // BLOCK_PAIRS
    first_of_item = np.searchsorted(items, items)  # an item's edges are never parted
    for block in np.split(np.arange(len(users)), np.flatnonzero(np.diff(blocks[first_of_item])) + 1):
        mine = counts[block]
        places = np.arange(mine.sum()) + np.repeat(starts[users[block]] - (np.cumsum(mine) - mine), mine)
        pairs = np.repeat(items[block], mine) * target.num_items + target.items[by_user[places]]
        found, common = np.unique(pairs, return_counts=True)
        yield found, common
