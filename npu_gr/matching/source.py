"""The items of the source domain beside the vectors of the target: who has them, and which target items are twins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import I64

NO_ITEMS: I64 = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourceItems:
    """The items of the source domain. J = its items, U = users."""

    ids: I64 | None  # [J] external ids, ascending and distinct; None: some of them are other items in the target
    seen_starts: I64  # [U + 1] user u has seen_items[seen_starts[u] : seen_starts[u + 1]]
    seen_items: npt.NDArray[np.int32]  # [source edges] rows, by user
    twin_starts: I64  # [J + 1] item j has the twins twin_items[twin_starts[j] : twin_starts[j + 1]]
    twin_items: npt.NDArray[np.int32]  # rows of the target's items: of no use for who owns the source's item

    def rows(self, item_ids: I64) -> I64:
        """Look up the rows of the known ids, ascending and distinct."""
        return NO_ITEMS if self.ids is None else np.unique(rows_of(self.ids, item_ids))

    def seen(self, user: int) -> I64:
        """List the rows that the training saw of a user; -1: none."""
        if user < 0:
            return NO_ITEMS
        return self.seen_items[slice(*self.seen_starts[user : user + 2])].astype(np.int64)

    def twins(self, rows: I64) -> I64:
        """List the target rows that are twins of some of these rows, ascending and distinct."""
        starts = self.twin_starts[rows]
        counts = self.twin_starts[rows + 1] - starts
        places = np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        return np.unique(self.twin_items[places]).astype(np.int64)


def rows_of(known: I64, item_ids: I64) -> I64:
    """Look up the rows of the known ids, in the order in which they are asked for.

    Args:
        known: int64 [n] ids, ascending, at least one.
        item_ids: any ids.
    """
    places = np.searchsorted(known, item_ids)
    places[places == len(known)] = 0
    rows: I64 = places[known[places] == item_ids]
    return rows
