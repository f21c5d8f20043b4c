"""The kinds of neighbours that the validation chooses among: by which similarity, and of how many events.

    cosine   shrunk, as `neighbours.py` counts it; of the last five events, or of 500
    EASE     what an item adds to another one by the linear autoencoder, where that is above 0; of 500 events
    summed   the cosines to all items of the history together, not their mean

A sum counts the more against popularity the more of the user is known; of a mean, thirty items say no more than three.
On logs with few events it is the best kind, and the validation of such a log cannot tell: so it is the first one. EASE
is not summed: on the validation of MovieLens its sum is worse than its mean (NDCG@10 .1302, .1365).

Where the order of events says much, five events say more than all. Where it says nothing all do, and EASE does best on
a log whose items have many events: it takes off what a pair has in common through other items. 500, because a request
reads so many rows; with 100 EASE loses .004 to .006 of NDCG@10 on MovieLens with its events shuffled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from npu_gr.model.neighbours import LAST_ITEMS, MAX_NEIGHBOURS, Neighbours
from npu_gr.train.baselines.choose import MAX_EDGES, graph_of
from npu_gr.train.baselines.linear import BLOCK_ROWS, EASE, ease_is_too_large
from npu_gr.train.data import InteractionLog
from npu_gr.train.rank.neighbours import count_neighbours
from npu_gr.train.rank.sparse_rows import Entries, joined

MANY_ITEMS = 500  # events that are read where the order of events says little


class NeighbourKind(NamedTuple):
    """A way to count neighbours."""

    last_items: int  # events of a history that are read
    ridge: float | None = None  # of EASE; None = the cosine
    is_summed: bool = False  # whether the sum of the similarities counts, not their mean

    @property
    def name(self) -> str:
        """In words."""
        similarity = "cosine" if self.ridge is None else f"EASE, ridge {self.ridge:g}"
        return f"{similarity}, last {self.last_items}{', summed' if self.is_summed else ''}"

    def counted(self, log: InteractionLog) -> Neighbours:
        """Count the neighbours in the trained events of a log.

        Raises:
            DataError: the log is too large for EASE.
        """
        found = count_neighbours(log) if self.ridge is None else ease_neighbours(log, self.ridge)
        return self._read(found)

    def _read(self, found: Neighbours) -> Neighbours:
        """Read counted neighbours as this kind does."""
        return replace(found, last_items=self.last_items, is_summed=self.is_summed)


USUAL = NeighbourKind(MANY_ITEMS, is_summed=True)
KINDS = (
    USUAL,
    NeighbourKind(LAST_ITEMS),
    NeighbourKind(MANY_ITEMS),
    NeighbourKind(MANY_ITEMS, 100.0),
    NeighbourKind(MANY_ITEMS, 1000.0),
)
"""The one first that is taken where the validation cannot tell."""


def count_kinds(log: InteractionLog) -> dict[NeighbourKind, Neighbours]:
    """Count the neighbours of every kind in the trained events, each similarity once; the usual kind comes first."""
    counted: dict[float | None, Neighbours] = {}
    for kind in _kinds_of(log):
        if kind.ridge not in counted:
            counted[kind.ridge] = kind.counted(log)
    return {kind: kind._read(counted[kind.ridge]) for kind in _kinds_of(log)}


def _kinds_of(log: InteractionLog) -> Sequence[NeighbourKind]:
    """List the kinds that can be counted in a log of this size, its untrained events included: all will be trained."""
    whole = graph_of(log.all_trained())
    if len(whole.users) > MAX_EDGES or ease_is_too_large(whole) is not None:
        return [kind for kind in KINDS if kind.ridge is None]
    return KINDS


def ease_neighbours(log: InteractionLog, ridge: float) -> Neighbours:
    """Keep the highest weights above 0 of each item's row of B.

    Args:
        log: its trained events count.
        ridge: as of `EASE`.

    Raises:
        DataError: the log is too large.
    """
    model = EASE(graph_of(log), log.num_items, ridge)
    best = []
    for start in range(0, log.num_items, BLOCK_ROWS):
        weights = model.weights(start, min(start + BLOCK_ROWS, log.num_items)).numpy()
        rows, columns = np.nonzero(weights > 0)
        found = Entries(rows + start, columns, weights[rows, columns].astype(np.float64))
        best.append(found.best_of_rows(MAX_NEIGHBOURS))
    return Neighbours(*joined(best).table(log.num_items, 0.0))
