"""Item-to-item similarity: how similar a candidate is to the items of a history.

    mean(i) = mean over the distinct items j of the last n events of similarity(j, i)

Each item stores its most similar items, its neighbours; all others have a similarity of 0. Training
chooses the measure of similarity, and n, for each log: see `train/rank/item_similarity.py`.

Source: ItemKNN (Deshpande and Karypis, TOIS 2004), EASE (Steck, WWW 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import F32, I64

I32 = npt.NDArray[np.int32]

MAX_NEIGHBOURS = 100  # per item
DENSE_PAIRS = 8  # pairs are sorted if the catalogue has more items than this per pair
LAST_ITEMS = 5  # default number of events of a history that are read


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """The most similar items of each item. I = items, K = stored neighbours of an item."""

    items: I32  # [I, K] item rows, ascending; -1 = padding, which comes first
    similarity: F32  # [I, K] above 0 (linear: not 0); 0 in the padding
    last_items: int = LAST_ITEMS  # number of newest events of a history that are read
    is_summed: bool = False  # the blend uses the sum of the similarities, not their mean
    is_linear: bool = False  # the blend uses the sum itself, not its logarithm

    def __post_init__(self) -> None:
        """Check shapes and values.

        Raises:
            ValueError: A field is invalid; the message names it.
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
        """Compute each candidate's mean similarity to the items of the history; see `sums`."""
        sums, num_rows = self._looked_up(history, candidates)
        return sums / max(1, num_rows)

    def sums(self, history: I64, candidates: I64) -> npt.NDArray[np.float64]:
        """Compute each candidate's sum of similarities to the items of the history.

        Args:
            history: int64 [n] item rows, oldest first; the last `last_items` are read, each
                distinct item once, new items are skipped.
            candidates: int64 [c] item rows; new items get 0.

        Returns:
            float64 [c]; negative only if `is_linear`.
        """
        return self._looked_up(history, candidates)[0]

    def _looked_up(self, history: I64, candidates: I64) -> tuple[npt.NDArray[np.float64], int]:
        """Return the candidates' sums, [c], and the number of items that were summed over."""
        found, sums, num_rows = self.found(history)
        of_candidates = np.zeros(len(candidates))
        if len(found):
            place = np.minimum(np.searchsorted(found, candidates), len(found) - 1)
            is_found = found[place] == candidates
            of_candidates[is_found] = sums[place[is_found]]
        return of_candidates, num_rows

    def top(self, history: I64, k: int) -> I64:
        """Retrieve the items with the largest sums of similarities to the history.

        Args:
            history: int64 [n] item rows, oldest first.
            k: Largest number of items.

        Returns:
            int64 [<= k] item rows, best first, ties by the lower row; only stored neighbours, so
            there may be few.
        """
        found, sums, _ = self.found(history)
        return best_rows(found, sums, k)

    def are_many(self, history: I64) -> bool:
        """Return whether summing over the whole catalogue is cheaper than sorting the pairs."""
        num_pairs = min(len(history), self.last_items) * self.items.shape[1]
        return bool(num_pairs >= len(self.items) / DENSE_PAIRS)

    def found(self, history: I64) -> tuple[I64, npt.NDArray[np.float64], int]:
        """Sum the similarities to a history's distinct items; see `sums`.

        Returns:
            int64 [n] the neighbours of the items, ascending; float64 [n] their sums; the number of
            items that were summed over.
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
        k: Largest number of rows.

    Returns:
        int64 [<= k], best first, ties by the lower row.
    """
    if 0 < k < len(rows):  # sort only the k best and their ties
        is_best = scores >= np.partition(scores, -k)[-k]
        rows, scores = rows[is_best], scores[is_best]
    best: I64 = rows[np.lexsort((rows, -scores))[:k]]
    return best
