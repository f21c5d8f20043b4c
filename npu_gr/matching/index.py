"""Find the best items for a query vector: exactly, or approximately for catalogues too big for an exact pass."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from npu_gr.backend.base import Backend
from npu_gr.backend.best_items import Best, Hidden
from npu_gr.core.arrays import F32
from npu_gr.core.errors import ConfigError
from npu_gr.matching.config import IndexName

# Parameters of the HNSW graph. More of each finds more of the best items, and takes longer.
HNSW_LINKS = 32  # neighbours that the graph keeps of each item
HNSW_BUILD = 80  # candidates in view while an item is inserted
HNSW_SEARCH = 256  # candidates in view while a query is answered, at least


class Index(Protocol):
    """Finds items by inner product. Never changed after it was built."""

    def search(self, queries: Tensor, k: int, hidden: Hidden | None = None) -> Best:
        """Find the best items of each query.

        Args:
            queries: float32 [B, d], on the host.
            k: items to find for each query, at least 1; may be more than there are items.
            hidden: (query, item) pairs that must not be found; None: no such pair.

        Returns:
            Scores and item rows [B, k] on the host, best first. A query with fewer items ends in -inf and -1.
        """
        ...


class ExactIndex:
    """Scores every item."""

    def __init__(self, items: F32, backend: Backend) -> None:
        self._backend = backend
        self._items = torch.from_numpy(np.ascontiguousarray(items)).to(backend.device)

    def search(self, queries: Tensor, k: int, hidden: Hidden | None = None) -> Best:
        found = self._backend.best_items(self._backend.upload(queries.numpy()), self._items, k, hidden)
        return Best(found.scores.cpu(), found.items.cpu())


class HnswIndex:
    """Searches a graph of near items greedily: approximate. Finds more items than asked for, and drops the hidden."""

    def __init__(self, items: F32) -> None:
        try:
            faiss: Any = importlib.import_module("faiss")
        except ImportError as error:
            raise ConfigError("match.index: hnsw needs pip install 'npu_gr[faiss]'") from error
        self._num_items = len(items)
        self._index: Any = faiss.IndexHNSWFlat(items.shape[1], HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        self._index.hnsw.efConstruction = HNSW_BUILD
        self._index.add(np.ascontiguousarray(items))
        self._parameters = faiss.SearchParametersHNSW

    def search(self, queries: Tensor, k: int, hidden: Hidden | None = None) -> Best:
        num_queries = len(queries)
        hidden_keys = torch.empty(0, dtype=torch.int64)  # query * num_items + item
        most_hidden = 0  # of one query
        if hidden is not None and len(hidden.items):
            most_hidden = int(torch.bincount(hidden.queries).max())
            hidden_keys = (hidden.queries * self._num_items + hidden.items).sort().values
        wide = min(self._num_items, k + most_hidden)
        search = self._parameters(efSearch=max(HNSW_SEARCH, 2 * wide))
        scores, items = map(torch.from_numpy, self._index.search(queries.numpy(), wide, params=search))
        keys = torch.arange(num_queries)[:, None] * self._num_items + items
        scores = scores.masked_fill((items < 0) | torch.isin(keys, hidden_keys), -torch.inf)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        items = items.gather(1, order).masked_fill(scores == -torch.inf, -1)
        short = max(0, k - wide)
        pad = torch.nn.functional.pad
        return Best(pad(scores[:, :k], (0, short), value=-torch.inf), pad(items[:, :k], (0, short), value=-1))


def make_index(name: IndexName, items: F32, backend: Backend) -> Index:
    """Build an index. `hnsw` takes minutes for a million items.

    Args:
        name: exact, or approximate.
        items: float32 [I, d].
        backend: runs the exact search.

    Raises:
        ConfigError: `hnsw` is asked for, and faiss is not installed.
    """
    return ExactIndex(items, backend) if name == "exact" else HnswIndex(items)


def recall(found: Best, exact: Best) -> float:
    """Compute the share of the exact answers' items that another answer to the same queries found."""
    wanted = exact.items >= 0
    hits = (exact.items[:, :, None] == found.items[:, None, :]).any(-1) & wanted
    return float(hits.sum() / wanted.sum().clamp(min=1))
