"""The kinds of neighbours that the validation chooses among: by which similarity, and of how many events.

    cosine   shrunk, as `neighbours.py` counts it; of the last five events, or of 500
    EASE     what an item adds to another one by the linear autoencoder, where that is above 0; of 500 events
    summed   the cosines to all items of the history together, not their mean
    linear   the sum of EASE's weights themselves, those below 0 too: what EASE scores

A sum counts the more against popularity the more of the user is known; of a mean, thirty items say no more than three.
On logs with few events it is the best kind, and the validation of such a log cannot tell: so it is the first one. The
logarithm of a sum of EASE's weights above 0 is no kind: on the validation of MovieLens it is worse than that of their
mean (NDCG@10 .1302, .1365).

Where the order of events says much, five events say more than all. Where it says nothing all do, and EASE does best on
a log whose items have many events: it takes off what a pair has in common through other items. There the weights below
0 matter: on the tests of six draws of 600 users of MovieLens with their events shuffled the fitted order has .1777 of
NDCG@10 with linear ones, .1647 with the mean, and EASE by itself .1799. On logs with few events the mean is better.
500 events, because a request reads so many rows; with 100 EASE loses .004 to .006 of NDCG@10 on such logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np

from npu_gr.core.arrays import F32
from npu_gr.model.neighbours import LAST_ITEMS, MAX_NEIGHBOURS, Neighbours
from npu_gr.train.baselines.choose import MAX_EDGES, graph_of
from npu_gr.train.baselines.linear import BLOCK_ROWS, EASE, ease_is_too_large
from npu_gr.train.data import InteractionLog
from npu_gr.train.rank.linear_neighbours import MANY_ITEMS, MANY_NEIGHBOURS, linear_neighbours
from npu_gr.train.rank.neighbours import count_neighbours
from npu_gr.train.rank.sparse_rows import Entries, joined


class NeighbourKind(NamedTuple):
    """A way to count neighbours."""

    last_items: int  # events of a history that are read
    ridge: float | None = None  # of EASE; None = the cosine
    is_summed: bool = False  # whether the sum of the similarities counts, not their mean
    is_linear: bool = False  # whether this sum itself counts, of EASE's weights below 0 too

    @property
    def name(self) -> str:
        """In words."""
        similarity = "cosine" if self.ridge is None else f"EASE, ridge {self.ridge:g}"
        how = "linear" if self.is_linear else "summed" if self.is_summed else ""
        return ", ".join(filter(None, (similarity, f"last {self.last_items}", how)))

    @property
    def num_neighbours(self) -> int:
        """Of an item, which a request reads for each of its events; a large catalogue has fewer linear ones."""
        return MANY_NEIGHBOURS if self.is_linear else MAX_NEIGHBOURS

    def counted(self, log: InteractionLog) -> Neighbours:
        """Count the neighbours in the trained events of a log.

        Raises:
            DataError: the log is too large for EASE.
        """
        return self._read(_similarities(log, self.ridge), log.num_items)

    def _read(self, similarities: Neighbours | EASE, num_items: int) -> Neighbours:
        """Read the similarities as this kind does."""
        if isinstance(similarities, Neighbours):
            found = similarities
        elif self.is_linear:
            found = linear_neighbours(partial(_rows, similarities), num_items)
        else:
            found = ease_neighbours(similarities, num_items)
        return replace(found, last_items=self.last_items, is_summed=self.is_summed)


USUAL = NeighbourKind(MANY_ITEMS, is_summed=True)
KINDS = (
    USUAL,
    NeighbourKind(LAST_ITEMS),
    NeighbourKind(MANY_ITEMS),
    NeighbourKind(MANY_ITEMS, 100.0),
    NeighbourKind(MANY_ITEMS, 100.0, is_summed=True, is_linear=True),
    NeighbourKind(MANY_ITEMS, 1000.0),
)
"""The one first that is taken where the validation cannot tell."""


def count_kinds(log: InteractionLog) -> dict[NeighbourKind, Neighbours]:
    """Count the neighbours of every kind in the trained events, each similarity once; the usual kind comes first."""
    counted: dict[NeighbourKind, Neighbours] = {}
    for ridge, kinds in groupby(_kinds_of(log), key=lambda kind: kind.ridge):
        counted |= _of_ridge(log, ridge, kinds)
    return counted


def _of_ridge(
    log: InteractionLog, ridge: float | None, kinds: Iterable[NeighbourKind]
) -> dict[NeighbourKind, Neighbours]:
    """Count the kinds of one similarity; EASE's matrix, up to half a gigabyte, is gone before the next one is made."""
    similarities = _similarities(log, ridge)
    return {kind: kind._read(similarities, log.num_items) for kind in kinds}


def _kinds_of(log: InteractionLog) -> Sequence[NeighbourKind]:
    """List the kinds that can be counted in a log of this size, its untrained events included: all will be trained."""
    whole = graph_of(log.all_trained())
    if len(whole.users) > MAX_EDGES or ease_is_too_large(whole) is not None:
        return [kind for kind in KINDS if kind.ridge is None]
    return KINDS


def _similarities(log: InteractionLog, ridge: float | None) -> Neighbours | EASE:
    """Count the cosines in the trained events; with a ridge, EASE. Raises DataError: the log is too large for it."""
    return count_neighbours(log) if ridge is None else EASE(graph_of(log), log.num_items, ridge)


def ease_neighbours(model: EASE, num_items: int) -> Neighbours:
    """Keep the highest weights above 0 of each item's row of B.

    Args:
        model: of all items.
        num_items: of the catalogue.
    """
    best = []
    for start in range(0, num_items, BLOCK_ROWS):
        weights = _rows(model, start, min(start + BLOCK_ROWS, num_items))
        rows, columns = np.nonzero(weights > 0)
        found = Entries(rows + start, columns, weights[rows, columns].astype(np.float64))
        best.append(found.best_of_rows(MAX_NEIGHBOURS))
    return Neighbours(*joined(best).table(num_items, 0.0))


def _rows(model: EASE, start: int, stop: int) -> F32:
    rows: F32 = model.weights(start, stop).numpy()
    return rows
