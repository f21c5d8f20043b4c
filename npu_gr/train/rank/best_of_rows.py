"""The best entries of each row of a sparse matrix, as a table with padding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import F32, I64
from npu_gr.train.metrics import F64

I32 = npt.NDArray[np.int32]


def best_of_rows(
    rows: I64, columns: I64, values: F64, num_rows: int, most: int, padding: float
) -> tuple[I32, F32]:
    """Keep the entries with the highest values of each row; of equals those with the lower columns.

    Args:
        rows, columns, values: [n] each, every pair of row and column once.
        num_rows: of the table.
        most: entries of a row.
        padding: value where there is no entry.

    Returns:
        Columns int32 [num_rows, width], ascending, -1 = padding, which comes first; and their values float32
        [num_rows, width]. The width is that of the longest row.
    """
    best_first = np.lexsort((columns, -values, rows))
    place = np.arange(len(rows)) - np.searchsorted(rows[best_first], rows[best_first])
    chosen = best_first[place < most]
    kept = chosen[np.lexsort((columns[chosen], rows[chosen]))]
    of_row = np.bincount(rows[kept], minlength=num_rows)
    width = int(of_row.max(initial=0))
    at = np.arange(len(kept)) - (np.cumsum(of_row) - width)[rows[kept]]  # padding first
    found = np.full((num_rows, width), -1, np.int32)
    found[rows[kept], at] = columns[kept]
    table = np.full((num_rows, width), padding, np.float32)
    table[rows[kept], at] = values[kept]
    return found, table
