"""Which delta last changed what a prefix reads. A prefix's fingerprint has these numbers."""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import xxhash

from npu_gr.core.arrays import I64


class WeightStamps(NamedTuple):
    """Numbers of changes of a ranker's weights; 0 = not changed since it was opened. Immutable.

    Four bytes an item, and again that much for each version that a request still holds.
    """

    rows: npt.NDArray[np.int32]  # [num_items] of the last change of each item's vector
    every: int  # of the last change of weights that every prefix reads
    new_items: int  # of the last change of the vectors of items without residual rows
    # (until when, stamps) of weights before, newest first, of whose prefixes some may be served;
    # instants of time.monotonic()
    earlier: tuple[tuple[float, WeightStamps], ...] = ()

    @classmethod
    def none(cls, num_items: int) -> Self:
        """Return the stamps of weights that have not changed."""
        return cls(np.zeros(num_items, np.int32), 0, 0)

    def read_by(self, rows: I64) -> bytes:
        """Identify the weights that a prefix with these item rows, [n], reads.

        Returns:
            b"" if none of them has changed.
        """
        num_items = len(self.rows)
        is_new = rows >= num_items
        has_new = bool(is_new.any())
        own = self.rows[rows[~is_new] if has_new else rows]
        new_items = self.new_items if has_new else 0
        if not (self.every or new_items or own.any()):
            return b""
        return np.array([self.every, new_items], np.int64).tobytes() + own.tobytes()

    def marked(self, fingerprint: str, rows: I64) -> str:
        """Add the changes of what a prefix with these item rows reads to its fingerprint."""
        found = self.read_by(rows)
        return xxhash.xxh3_128_hexdigest(fingerprint.encode() + found) if found else fingerprint
