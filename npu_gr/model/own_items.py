"""The items that a user had: how often, and how long ago. Ages are counted in events.

An item weighs the sum of .97^age over its events in the history, so one that was had yesterday and
often weighs more than one that was had once, last year. Ages in events, not in seconds, mean the
same in a log of minutes, in one of years, and in one without times.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import F32, I64

OWN_DECAY = 0.97  # factor of an event's weight per newer event
MOST_OWN = 1000  # newest events that are read: older ones weigh below 1e-13


class OwnItems(NamedTuple):
    """The distinct items of a history. n = items."""

    items: I64  # [n] ascending
    weights: npt.NDArray[np.float64]  # [n] sum of .97^age over the item's events
    ages: I64  # [n] age of the item's newest event; 0 = the last event of the history

    @classmethod
    def of(cls, history: I64) -> OwnItems:
        """Count the items of a history, int64 [events], oldest first."""
        newest_first = history[-MOST_OWN:][::-1]
        items, ages, place = np.unique(newest_first, return_index=True, return_inverse=True)
        decayed = OWN_DECAY ** np.arange(len(newest_first))
        weights = np.bincount(place, decayed, len(items)).astype(np.float64)
        return cls(items, weights, ages)

    def best(self, k: int) -> I64:
        """Return the k items of the highest weight, best first; ties go to the newer one."""
        best: I64 = self.items[np.lexsort((self.ages, -self.weights))[:k]]
        return best

    def terms(self, candidates: I64) -> tuple[F32, F32, F32]:
        """Return three terms of a score blend for candidates, int64 [c].

        Returns:
            float32 [c] each: 1 if the candidate is in the history; log of its weight; log of
            1 + its age. All are 0 for other candidates.
        """
        if not len(self.items):
            return tuple(np.zeros((3, len(candidates)), np.float32))  # type: ignore[return-value]
        place, is_own = self._places(candidates)
        seen = is_own.astype(np.float32)
        count = seen * np.log(self.weights)[place].astype(np.float32)
        return seen, count, seen * np.log1p(self.ages)[place].astype(np.float32)

    def weights_of(self, candidates: I64) -> npt.NDArray[np.float64]:
        """Look up the weights of candidates, float64 [c]; 0 of those that the user never had."""
        if not len(self.items):
            return np.zeros(len(candidates))
        place, is_own = self._places(candidates)
        return np.where(is_own, self.weights[place], 0.0)

    def _places(self, candidates: I64) -> tuple[I64, npt.NDArray[np.bool_]]:
        place = np.searchsorted(self.items, candidates).clip(max=len(self.items) - 1)
        return place, self.items[place] == candidates
