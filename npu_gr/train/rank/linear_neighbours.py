"""Write the weights of a linear model as neighbours: what each item adds to the others, the strongest of each row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from npu_gr.core.arrays import F32
from npu_gr.model.neighbours import MAX_NEIGHBOURS, Neighbours
from npu_gr.train.baselines.linear import BLOCK_ROWS
from npu_gr.train.rank.sparse_rows import Entries, joined

MANY_ITEMS = 500  # events that are read where the order of events says little
MANY_NEIGHBOURS = 500  # of an item that are kept, where that is not too much for all items together
MAX_KEPT = 1 << 23  # neighbours of all items together: 64 MiB


def linear_neighbours(weights: Callable[[int, int], F32], num_items: int) -> Neighbours:
    """Keep the strongest weights of each row, whatever their sign.

    Args:
        weights: (start, stop) -> what these items add to every one, 0 to themselves: float32 [stop - start, num_items].
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
    return Neighbours(*joined(best).table(num_items, 0.0), MANY_ITEMS, is_summed=True, is_linear=True)
