"""Who finds the best items: exactly, or by an index library for catalogues that are too big for that."""

from __future__ import annotations

import importlib
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from npu_gr.backend.base import Backend
from npu_gr.backend.best_items import Best, Hidden
from npu_gr.core.errors import ConfigError
from npu_gr.core.request import F32

IndexName = Literal["exact", "hnsw"]
HNSW_LINKS, HNSW_BUILD, HNSW_SEARCH = 32, 80, 256


class Index(Protocol):
    """Finds items by inner product; never changed after it was built."""

    def search(self, queries: Tensor, k: int, hidden: Hidden | None = None) -> Best:
        """See `Backend.best_items`; the host's tensors."""
        ...


class ExactIndex:
    """Every item is looked at."""

    def __init__(self, items: F32, backend: Backend) -> None:
        self._backend = backend
        self._items = torch.from_numpy(np.ascontiguousarray(items)).to(backend.device)

    def search(self, queries: Tensor, k: int, hidden: Hidden | None = None) -> Best:
        """The best there are."""
        device = self._items.device
        if hidden is not None:
            hidden = Hidden(*(part.to(device) for part in hidden))
        found = self._backend.best_items(queries.to(device), self._items, k, hidden)
        return Best(found.scores.cpu(), found.items.cpu())


class HnswIndex:
    """A graph of near items, searched greedily: approximate; hidden items are asked for on top and left out."""

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
        """Most of the best."""
        num_queries = len(queries)
        off = torch.empty(0, dtype=torch.int64)
        most = 0
        if hidden is not None and len(hidden.items):
            most = int(torch.bincount(hidden.queries).max())
            off = (hidden.queries * self._num_items + hidden.items).sort().values
        wide = min(self._num_items, k + most)
        search = self._parameters(efSearch=max(HNSW_SEARCH, 2 * wide))
        scores, items = map(torch.from_numpy, self._index.search(queries.numpy(), wide, params=search))
        keys = torch.arange(num_queries)[:, None] * self._num_items + items
        scores = scores.masked_fill((items < 0) | torch.isin(keys, off), -torch.inf)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        items = items.gather(1, order).masked_fill(scores == -torch.inf, -1)
        short = max(0, k - wide)
        pad = torch.nn.functional.pad
        return Best(pad(scores[:, :k], (0, short), value=-torch.inf), pad(items[:, :k], (0, short), value=-1))


def make_index(name: IndexName, items: F32, backend: Backend) -> Index:
    """Build it; for `hnsw` minutes a million items.

    Raises:
        ConfigError: the library is not installed.
    """
    return ExactIndex(items, backend) if name == "exact" else HnswIndex(items)


def recall(found: Best, exact: Best) -> float:
    """Share of the exact answers' items that were found."""
    wanted = exact.items >= 0
    hits = (exact.items[:, :, None] == found.items[:, None, :]).any(-1) & wanted
    return float(hits.sum() / wanted.sum().clamp(min=1))
