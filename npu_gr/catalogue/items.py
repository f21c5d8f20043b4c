"""External item ids <-> the model's item rows, vectorised both ways."""

from __future__ import annotations

import numpy as np

from npu_gr.core.request import I64

UNKNOWN = -1
_DIRECT = 8  # a direct table may have this many slots an item; beyond it, binary search


class ItemVocabulary:
    """Which items the model knows. Never changed in place.

    Ids that are nearly dense (up to `_DIRECT` times the number of items) use one table look-up, others a binary
    search: 16 k ids cost tens of microseconds in the first case, about a millisecond at ten million sparse items.
    """

    def __init__(self, ids: I64) -> None:
        """Take over the ids, one a row: [num_items], distinct, not negative."""
        self.ids = ids
        self._order = np.argsort(ids)
        self._sorted = ids[self._order]
        self._table: I64 | None = None
        if len(ids) and int(self._sorted[-1]) < _DIRECT * len(ids) + 1024:
            self._table = np.full(int(self._sorted[-1]) + 2, UNKNOWN, np.int64)  # the last slot stays unknown
            self._table[ids] = np.arange(len(ids))

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, ids: I64) -> I64:
        """Row of each id, `UNKNOWN` where the catalogue lacks it. [n] -> [n]."""
        if self._table is not None:
            found: I64 = self._table[np.where((ids >= 0) & (ids < len(self._table)), ids, len(self._table) - 1)]
            return found
        at = np.searchsorted(self._sorted, ids).clip(max=len(self._sorted) - 1)
        return np.where(self._sorted[at] == ids, self._order[at], UNKNOWN)
