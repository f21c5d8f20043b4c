"""Neighbours: which items the same users have, and how much a candidate has in common with a history.

    mean(i) = mean over the distinct items j of the last n events of similarity(j, i)

Of each item the most similar ones are kept; any other has a similarity of 0. What similarities are,
and n, the training chooses for each log: see `train/rank/neighbours.py`.

Source: ItemKNN (Deshpande and Karypis, TOIS 2004), EASE (Steck, WWW 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import F32, I64

I32 = npt.NDArray[np.int32]

MAX_NEIGHBOURS = 100  # of an item
DENSE_PAIRS = 8  # items of a catalogue for each pair above which pairs are sorted
LAST_ITEMS = 5  # events of a history that are read, if nothing else was chosen


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """The most similar items of each item. I = items, K = neighbours kept of an item."""

    items: I32  # [I, K] item rows, ascending; -1 = padding, which comes first
    similarity: F32  # [I, K] above 0, linear ones below it too; 0 in the padding
    last_items: int = LAST_ITEMS  # events of a history that are read: the newest
    is_summed: bool = False  # whether the order counts the sum of the similarities, not their mean
    is_linear: bool = False  # whether it counts the sum itself, not its logarithm

    def __post_init__(self) -> None:
        """Check shapes and values.

        Raises:
            ValueError: they are no neighbours; the message names the field.
        """
        shape = self.items.shape
        if shape != self.similarity.shape or len(shape) != 2:
            raise ValueError(
                f"neighbours and similarity: need equal rows, got {shape}, {self.similarity.shape}"
            )
        is_known = self.items >= 0
        rises = (np.diff(self.items, axis=1) > 0) | ~is_known[:, :-1]
        if (self.items < -1).any() or (self.items >= len(self.items)).any() or not rises.all():
            raise ValueError(
                f"neighbours: need ascending item rows below {len(self.items)}, -1 before them"
            )
        if self.last_items < 1:
            raise ValueError(f"last_items: needs at least 1, got {self.last_items}")
        if self.is_linear and not self.is_summed:
            raise ValueError("is_linear: of a sum only")
        is_one = self.similarity != 0 if self.is_linear else self.similarity > 0
        if not np.isfinite(self.similarity).all() or (is_one != is_known).any():
            least = "other than 0" if self.is_linear else "above 0"
            raise ValueError(f"similarity: needs finite numbers {least}, and 0 in the padding")

    def means(self, history: I64, candidates: I64) -> npt.NDArray[np.float64]:
        """Compute what each candidate has in common with an item of the history, on average.

        As `sums`.
        """
        sums, num_rows = self._looked_up(history, candidates)
        return sums / max(1, num_rows)

    def sums(self, history: I64, candidates: I64) -> npt.NDArray[np.float64]:
        """Compute what each candidate has in common with all items of the history together.

        Args:
            history: int64 [n] item rows, oldest first; the last `last_items` count, each item once,
                and new ones are left out.
            candidates: int64 [c] item rows; new ones have 0.

        Returns:
            float64 [c], 0 or more; linear ones may be below it.
        """
        return self._looked_up(history, candidates)[0]

    def _looked_up(self, history: I64, candidates: I64) -> tuple[npt.NDArray[np.float64], int]:
        """Look up the candidates' sums, [c], and count the items that are summed over."""
        found, sums, num_rows = self.found(history)
        of_candidates = np.zeros(len(candidates))
        if len(found):
            place = np.minimum(np.searchsorted(found, candidates), len(found) - 1)
            is_found = found[place] == candidates
            of_candidates[is_found] = sums[place[is_found]]
        return of_candidates, num_rows

    def top(self, history: I64, k: int) -> I64:
        """Retrieve what has most in common with the history.

        Args:
            history: as of `sums`.
            k: most items.

        Returns:
            int64 [<= k] item rows, best first, of equals the lower row; only kept neighbours, so
            there may be few.
        """
        found, sums, _ = self.found(history)
        return best_rows(found, sums, k)

    def are_many(self, history: I64) -> bool:
        """Whether sums of the whole catalogue are cheaper than sorting what the history has in common with it."""
        num_pairs = min(len(history), self.last_items) * self.items.shape[1]
        return bool(num_pairs >= len(self.items) / DENSE_PAIRS)

    def found(self, history: I64) -> tuple[I64, npt.NDArray[np.float64], int]:
        """Sum up the similarities to a history's distinct items, as of `sums`.

        Returns:
            int64 [n] their neighbours, ascending; float64 [n] the sums; and how many items the sums
            are over.
        """
        recent = history[-self.last_items :]
        rows = np.unique(recent[recent < len(self.items)])
        items, similarity = self.items[rows].ravel(), self.similarity[rows].ravel()
        is_known = items >= 0
        items, similarity = items[is_known], similarity[is_known]
        if len(items) < len(self.items) / DENSE_PAIRS:
            different, place = np.unique(items, return_inverse=True)
            found = different.astype(np.int64)
            sums = np.bincount(place, similarity, len(found))
        else:  # sums of the whole catalogue are cheaper than sorting many pairs
            sums = np.bincount(items, similarity, len(self.items))
            found = np.flatnonzero(sums)
            sums = sums[found]
        return found, sums.astype(np.float64), len(rows)


def best_rows(rows: I64, scores: npt.NDArray[np.float64], k: int) -> I64:
    """Choose the rows with the highest scores.

    Args:
        rows: int64 [n] item rows, each once.
        scores: float64 [n].
        k: most rows.

    Returns:
        int64 [<= k], best first, of equals the lower row.
    """
    if 0 < k < len(rows):  # only these are sorted
        is_best = scores >= np.partition(scores, -k)[-k]
        rows, scores = rows[is_best], scores[is_best]
    best: I64 = rows[np.lexsort((rows, -scores))[:k]]
    return best
