"""Approximate search: items in lists around centroids, of which a query reads the best.

The table is 16-bit floats and an id, 2 d + 8 bytes an item, besides the exact one. The number of
lists that a query reads is chosen when the index is built: the least power of two that finds
`WANTED` of the exact results of users' own vectors. `recall` is of other users' vectors.
"""

from __future__ import annotations

import copy
import importlib
import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from npu_gr.backend.best_items import Best, Hidden
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import ConfigError
from npu_gr.vector_search.index import Index, recall

log = logging.getLogger(__name__)

RECALL_AT = 100  # best items that are compared
WANTED = 0.995  # of them, when the index is built
PROMISED = 0.99  # of them, while it is served
NUM_QUERIES = 200  # users' vectors of the choice, and as many of `recall`
_SEED = 0
_TRAINED = 128  # items of a list from which its centroid is made, on average
_ROUNDS = 10  # of k-means
_BLOCK = 1 << 18  # items that are added at a time


def load_faiss(setting: str) -> Any:
    """Import faiss, for a setting that is `ivf`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise ConfigError(f"{setting}: ivf needs pip install 'npu_gr[faiss]'") from error


class IvfIndex:
    """Reads the best lists of a query, finds extra items, and drops the hidden ones."""

    def __init__(self, items: F32, users: F32, exact: Index) -> None:
        """Build the index: minutes for tens of millions of items.

        Args:
            items: float32 [I, d].
            users: float32 [U, d] vectors of users, to choose and measure by; the items' if empty.
            exact: Exact index of the items.

        Raises:
            ConfigError: faiss is not installed.
        """
        faiss = load_faiss("match.index")
        num_items, dim = items.shape
        self._num_items: int = num_items
        self.num_lists = 1 << int(np.log2(num_items) / 2)
        self._centroids: Any = faiss.IndexFlatIP(dim)
        self._index: Any = faiss.IndexIVFScalarQuantizer(
            self._centroids,
            dim,
            self.num_lists,
            faiss.ScalarQuantizer.QT_fp16,
            faiss.METRIC_INNER_PRODUCT,
            False,  # no residuals: a score is that of the item's own 16-bit vector
        )
        self._index.cp.niter = _ROUNDS
        self._index.cp.min_points_per_centroid = 1
        self._index.cp.max_points_per_centroid = _TRAINED
        random = np.random.default_rng(_SEED)
        trained = min(num_items, self.num_lists * _TRAINED)
        self._index.train(items[np.sort(random.choice(num_items, trained, replace=False))])
        for first in range(0, num_items, _BLOCK):
            self._index.add(np.ascontiguousarray(items[first : first + _BLOCK]))
        self._parameters = faiss.SearchParametersIVF
        self._selector = faiss.IDSelectorBitmap
        self._kept: npt.NDArray[np.uint8] | None = None  # a bit for each item; None = all are kept
        queries = users if len(users) else items
        some = random.choice(len(queries), min(len(queries), 2 * NUM_QUERIES), replace=False)
        choosing, others = (torch.from_numpy(queries[part]) for part in (some[::2], some[1::2]))
        others = others if len(others) else choosing
        self.num_probes = 1
        self._choose(choosing, exact)
        self.recall = self._recall(others, exact.search(others, self._at))
        log.info(
            "index: ivf: %d items in %d lists, of which a query reads %d: recall@%d %.4f of %d "
            "users' vectors",
            *(num_items, self.num_lists, self.num_probes, self._at, self.recall, len(others)),
        )
        if self.recall < PROMISED:
            log.warning("index: ivf finds less than %.2f of the exact items", PROMISED)

    @property
    def _at(self) -> int:
        return min(RECALL_AT, self._num_items)

    def _choose(self, queries: Tensor, exact: Index) -> None:
        wanted = exact.search(queries, self._at)
        while self.num_probes < self.num_lists and self._recall(queries, wanted) < WANTED:
            self.num_probes *= 2

    def _recall(self, queries: Tensor, wanted: Best) -> float:
        return recall(self.search(queries, self._at), wanted)

    def without(self, rows: I64) -> IvfIndex:
        """Return this index without items [n], in any order; it shares the vectors."""
        if self._kept is None:
            kept = np.full(-(-self._num_items // 8), 255, np.uint8)
        else:
            kept = self._kept.copy()
        np.bitwise_and.at(kept, rows >> 3, ~(np.uint8(1) << (rows & 7).astype(np.uint8)))
        other = copy.copy(self)
        other._kept = kept
        return other

    def search(self, queries: Tensor, k: int, hidden: Hidden | None = None) -> Best:
        """Find the best items of each query; see `Index`."""
        hidden_keys = torch.empty(0, dtype=torch.int64)  # query * num_items + item
        most_hidden = 0  # most hidden items of one query
        if hidden is not None and len(hidden.items):
            most_hidden = int(torch.bincount(hidden.queries).max())
            hidden_keys = (hidden.queries * self._num_items + hidden.items).sort().values
        wide = min(self._num_items, k + most_hidden)
        kept = None if self._kept is None else self._selector(self._kept)
        how = self._parameters(nprobe=self.num_probes, sel=kept)
        scores, items = map(torch.from_numpy, self._index.search(queries.numpy(), wide, params=how))
        keys = torch.arange(len(queries))[:, None] * self._num_items + items
        scores = scores.masked_fill((items < 0) | torch.isin(keys, hidden_keys), -torch.inf)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        items = items.gather(1, order).masked_fill(scores == -torch.inf, -1)
        short = max(0, k - wide)
        pad = torch.nn.functional.pad
        return Best(
            pad(scores[:, :k], (0, short), value=-torch.inf),
            pad(items[:, :k], (0, short), value=-1),
        )
