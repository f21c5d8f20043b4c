"""Approximate search of a ranker's own items with u, which stays right while items change.

    exact search -> `NUM_USERS` u of requests -> an index is built on a thread -> it takes over

Rows that a delta has written since it was built are hidden in the index and searched exactly next
to it, as are those of new items, before any pass reads them. Once they are many it is built again.

What is found is scored again by the table as it is, so it comes in the order of the exact search.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from npu_gr.backend.best_items import Hidden
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import ConfigError
from npu_gr.engine.rank_engine import RankEngine
from npu_gr.vector_search.index import ExactIndex
from npu_gr.vector_search.ivf import NUM_QUERIES, IvfIndex, load_faiss

log = logging.getLogger(__name__)

NUM_USERS = 2 * NUM_QUERIES  # newest u by which an index is built and measured
AGAIN = 1 / 64  # share of the items that deltas have written, over which it is built again
MOST = 1 / 8  # share over which the search is exact until then
_SETTING = "recommend.index"
_NO_ROWS: I64 = np.empty(0, np.int64)


class _Serving(NamedTuple):
    near: IvfIndex  # without `changed`
    changed: I64  # [n] ascending rows of trained items
    items: Tensor  # [n, d] their vectors


class EncoderIndex:
    """The index of one engine's items, which are on the host. Its methods are for device threads.

    Set `RankEngine.search` to its `search`.
    """

    def __init__(self, engine: RankEngine) -> None:
        """Begin without an index.

        Raises:
            ConfigError: the items are on a device, or faiss is not installed.
        """
        self._backend = engine.backend
        if self._backend.device.type != "cpu":
            raise ConfigError(
                f"{_SETTING}: ivf searches on the host; backend {self._backend.name} searches "
                "exactly on its device: use exact"
            )
        load_faiss(_SETTING)
        self._table = engine.weights.table
        self._num_items = engine.model.config.num_items
        self._lock = threading.Lock()  # of all that follows
        self._users: deque[F32] = deque(maxlen=NUM_USERS)
        self._serving: _Serving | None = None  # None = the search is exact
        self._written = _NO_ROWS  # ascending trained rows, since the newest build began
        self._builder: threading.Thread | None = None  # None = no index is being built
        engine.weights.on_written = self._write

    def search(self, vectors: Tensor, k: int, hidden: Sequence[I64], num_rows: int) -> I64 | None:
        """Find items; see `ApproximateSearch`.

        The search is exact if there is no index, if most items are hidden, if the lists that are
        read have too few items, and for a u of zeros (head `dot` without events): all scores tie.
        """
        serving, table = self._learn(vectors), self._table()
        if serving is None:
            return None
        new, new_items = np.arange(self._num_items, num_rows), table[self._num_items : num_rows]
        found = np.full((len(vectors), k), -1)
        for place, own in enumerate(hidden):
            u = vectors[place : place + 1]
            if 2 * len(own) > num_rows or not u.any():
                return None
            near = serving.near.without(own[own < self._num_items]).search(u, k).items[0].numpy()
            changed = self._exactly(u, k, own, serving.changed, serving.items)
            others = self._exactly(u, k, own, new, new_items)
            rows = np.concatenate([near[near >= 0], changed, others])
            if len(rows) < k and len(rows) < num_rows - len(np.unique(own)):
                return None
            scores = self._backend.item_products(u[0], table, torch.from_numpy(rows)).numpy()
            best = rows[np.lexsort((rows, -scores))][:k]
            found[place, : len(best)] = best
        return found

    def _exactly(self, u: Tensor, k: int, hidden: I64, rows: I64, items: Tensor) -> I64:
        """Search a few rows [n], ascending, with vectors [n, d]."""
        if not len(rows):
            return rows
        at = np.searchsorted(rows, hidden)
        at = np.unique(at[rows.take(at, mode="clip") == hidden])
        best = self._backend.best_items(u, items, k, Hidden.of([at])).items[0].numpy()
        found: I64 = rows[best[best >= 0]]
        return found

    def _learn(self, vectors: Tensor) -> _Serving | None:
        """Keep u [B, d], begin to build if it is time, and return what is searched."""
        with self._lock:
            self._users.extend(vectors[vectors.any(1)].numpy())  # copies
            serving = self._serving
            is_old = serving is None or len(serving.changed) > AGAIN * self._num_items
            if is_old and self._builder is None and len(self._users) == NUM_USERS:
                self._written = _NO_ROWS
                self._builder = threading.Thread(
                    target=self._build, args=(np.stack(self._users),), daemon=True
                )
                self._builder.start()
            return serving

    def _write(self, rows: I64) -> None:
        """Search written rows [n] exactly from now on, before a pass reads them."""
        rows = rows[rows < self._num_items]
        with self._lock:
            self._written = np.union1d(self._written, rows)
            if (now := self._serving) is not None and len(rows):
                self._serving = self._without(now.near, np.union1d(now.changed, rows))

    def _without(self, index: IvfIndex, changed: I64) -> _Serving | None:
        if len(changed) > MOST * self._num_items:
            return None
        return _Serving(index.without(changed), changed, self._table()[torch.from_numpy(changed)])

    def _build(self, users: F32) -> None:
        """Build an index, on a thread of its own; if that fails, nothing tries it again."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        load_faiss(_SETTING).omp_set_num_threads(1)  # of this thread alone
        items = self._table()[: self._num_items].numpy()
        index = IvfIndex(items, users, ExactIndex(items, self._backend))
        with self._lock:
            self._serving = self._without(index, self._written)
            self._builder = None
        log.info("%s: ivf searches from now on", _SETTING)
