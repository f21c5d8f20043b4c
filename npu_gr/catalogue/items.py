"""Map external item ids to the rows of the model's item table and back, vectorised."""

from __future__ import annotations

import numpy as np

from npu_gr.core.arrays import I64

UNKNOWN = -1
_DIRECT = 8  # slots that a direct table may have for each item; sparser ids use a binary search


class ItemVocabulary:
    """The items that the model knows. Never changed in place.

    Nearly dense ids (the largest is at most about `_DIRECT` times the number of items) use one table look-up, others
    a binary search: 16 k ids take tens of microseconds with the table, about a millisecond among ten million sparse
    ids.
    """

    def __init__(self, ids: I64) -> None:
        """Keep the ids: int64 [num_items], the id of each row, distinct, not negative."""
        self.ids = ids
        self._order = np.argsort(ids)
        self._sorted = ids[self._order]
        self._table: I64 | None = None
        if len(ids) and int(self._sorted[-1]) < _DIRECT * len(ids) + 1024:
            # One slot an id from 0 to the largest, and a last one that ids beyond them look up.
            self._table = np.full(int(self._sorted[-1]) + 2, UNKNOWN, np.int64)
            self._table[ids] = np.arange(len(ids))

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, ids: I64) -> I64:
        """Look up the row of each id, `UNKNOWN` if the model does not know it. [n] -> [n]."""
        if self._table is not None:
            found: I64 = self._table[np.where((ids >= 0) & (ids < len(self._table)), ids, len(self._table) - 1)]
            return found
        at = np.searchsorted(self._sorted, ids).clip(max=len(self._sorted) - 1)
        return np.where(self._sorted[at] == ids, self._order[at], UNKNOWN)
