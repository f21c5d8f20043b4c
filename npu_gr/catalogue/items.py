"""Map external item ids to the rows of the model's item table and back, vectorised."""

from __future__ import annotations

import copy

import numpy as np

from npu_gr.core.arrays import I64

UNKNOWN = -1
_DIRECT = 8  # slots that a direct table may have for each item; sparser ids use a binary search


class ItemVocabulary:
    """The items that the model knows: those that it was trained with, and new ones. Never changed in place.

    Nearly dense ids (from the smallest to the largest there are at most about `_DIRECT` times as many as items) use one
    table look-up, others a binary search: 16 k ids take tens of microseconds with the table, about a millisecond among
    ten million sparse ids.
    """

    def __init__(self, ids: I64) -> None:
        """Keep the trained items: int64 [num_items], the id of each row, distinct, not negative."""
        self.ids = ids
        order = np.argsort(ids)
        self._sorted = ids[order]
        # one more, which an id beyond the largest finds
        self._order = np.append(order, UNKNOWN)
        self._found = np.append(self._sorted, UNKNOWN)
        self._table: I64 | None = None
        if len(ids) and int(self._sorted[-1] - self._sorted[0]) < _DIRECT * len(ids) + 1024:
            # one slot an id from the smallest to the largest, and one at each end that ids beyond them look up
            self._before = int(self._sorted[0]) - 1  # id of the first slot
            self._table = np.full(int(self._sorted[-1]) - self._before + 2, UNKNOWN, np.int64)
            self._table[ids - self._before] = np.arange(len(ids))
        self.new_ids: I64 = np.empty(0, np.int64)  # id of each row behind the trained ones
        self._new_rows: I64 = self.new_ids  # of the new items, by ascending id
        self._new_sorted: I64 = self.new_ids

    def __len__(self) -> int:
        """Number of rows, the trained and the new ones."""
        return len(self.ids) + len(self.new_ids)

    def with_new(self, ids: I64) -> ItemVocabulary:
        """Return this vocabulary with new items on the rows behind its last one; the tables of trained ids are shared.

        Args:
            ids: int64 [n], none of a trained item, each once. One that is new already moves to its later row.
        """
        made = copy.copy(self)
        made.new_ids = np.concatenate([self.new_ids, ids])
        newest_first = made.new_ids[::-1]
        made._new_sorted, place = np.unique(newest_first, return_index=True)  # the first of equals is the newest row
        made._new_rows = len(made) - 1 - place
        return made

    def rows(self, ids: I64) -> I64:
        """Look up the row of each id, `UNKNOWN` if the model does not know it. [n] -> [n]."""
        found = self.trained_rows(ids)
        if len(self._new_sorted) and len(left := np.flatnonzero(found == UNKNOWN)):
            at = np.searchsorted(self._new_sorted, ids[left]).clip(max=len(self._new_sorted) - 1)
            found[left] = np.where(self._new_sorted[at] == ids[left], self._new_rows[at], UNKNOWN)
        return found

    def trained_rows(self, ids: I64) -> I64:
        """Look up the row of each id, `UNKNOWN` if the model was not trained with it. [n] -> [n]."""
        if self._table is not None:
            return self._table.take(ids - self._before, mode="clip")
        at = self._sorted.searchsorted(ids)
        found = self._order[at]
        found[self._found[at] != ids] = UNKNOWN
        return found

    def ids_of(self, rows: I64) -> I64:
        """Look up the id of each row, [n] -> [n]."""
        if not len(self.new_ids):
            return self.ids[rows]
        is_new = rows >= len(self.ids)
        found = self.ids[np.where(is_new, 0, rows)]
        found[is_new] = self.new_ids[rows[is_new] - len(self.ids)]
        return found
