"""A sparse matrix of items by items: the best entries of each row, and a table of them with padding."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import F32, I64
from npu_gr.train.metrics import F64

I32 = npt.NDArray[np.int32]


class Entries(NamedTuple):
    """Entries of a matrix, each pair of row and column at most once. n = entries."""

    rows: I64  # [n]
    columns: I64  # [n]
    values: F64  # [n]

    def best_of_rows(self, most: int) -> Entries:
        """Keep the highest entries of each row, of equals the lower columns; sorted by rows, then by columns."""
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
            Columns int32 [num_rows, width], -1 = padding, which comes first; and their values float32 [num_rows,
            width]. The width is that of the longest row.
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
