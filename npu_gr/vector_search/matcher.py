"""Answer `match` requests from one version of the vectors, many users at once.

The basis of an answer is the first of these that applies to the user; the answer names it:
  folded      the history has items that the training did not see: compute a vector from all of it (`fold.py`)
  target      the user has target history: the user's target vector against the item vectors
  source      the user has source history only: the user's vector, which knows that history, against the same items
  popularity  the user has neither: the items with the most target edges

An index finds the best items for a query vector: exactly, or approximately for catalogues too big
for an exact pass.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from npu_gr.backend.base import Backend
from npu_gr.backend.best_items import Best, Hidden
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import ConfigError
from npu_gr.core.history import UserKey
from npu_gr.core.request import Basis
from npu_gr.vector_search.config import IndexName
from npu_gr.vector_search.fold import NO_ITEMS, rows_of
from npu_gr.vector_search.vectors import Vectors

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
            Scores and item rows [B, k] on the host, best first. A query with fewer items ends in
            -inf and -1.
        """
        ...


class ExactIndex:
    """Scores every item."""

    def __init__(self, items: F32, backend: Backend) -> None:
        self._backend = backend
        self._items = torch.from_numpy(np.ascontiguousarray(items)).to(backend.device)

    def search(self, queries: Tensor, k: int, hidden: Hidden | None = None) -> Best:
        found = self._backend.best_items(
            self._backend.upload(queries.numpy()), self._items, k, hidden
        )
        return Best(found.scores.cpu(), found.items.cpu())


class HnswIndex:
    """Searches a graph of near items greedily: approximate.

    Finds more items than asked for, and drops the hidden.
    """

    def __init__(self, items: F32) -> None:
        try:
            faiss: Any = importlib.import_module("faiss")
        except ImportError as error:
            raise ConfigError("match.index: hnsw needs pip install 'npu_gr[faiss]'") from error
        self._num_items = len(items)
        self._index: Any = faiss.IndexHNSWFlat(
            items.shape[1], HNSW_LINKS, faiss.METRIC_INNER_PRODUCT
        )
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
        scores, items = map(
            torch.from_numpy, self._index.search(queries.numpy(), wide, params=search)
        )
        keys = torch.arange(num_queries)[:, None] * self._num_items + items
        scores = scores.masked_fill((items < 0) | torch.isin(keys, hidden_keys), -torch.inf)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        items = items.gather(1, order).masked_fill(scores == -torch.inf, -1)
        short = max(0, k - wide)
        pad = torch.nn.functional.pad
        return Best(
            pad(scores[:, :k], (0, short), value=-torch.inf),
            pad(items[:, :k], (0, short), value=-1),
        )


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


@dataclass(frozen=True, slots=True, eq=False)
class MatchQuery:
    """The search for one user. Item rows are ascending and distinct."""

    basis: Basis
    user: int  # row; -1: a user who was not in the training
    k: int  # most items to find
    hidden: I64  # item rows that must not be found
    allowed: I64 | None = None  # the only item rows that may be found; None: all
    # rows that the vector is computed from, as `Folding.vector` takes them; FOLDED only
    history: I64 | None = None
    # rows of the source's items, likewise
    source_history: I64 = field(default_factory=lambda: NO_ITEMS)


@dataclass(frozen=True, slots=True, eq=False)
class MatchedItems:
    """At most k items, best first; of equal scores the lower row comes first."""

    items: I64  # [n] rows
    scores: F32  # [n] inner products; target edges if the basis is POPULARITY


class Matcher:
    """One version of the vectors with its index.

    Never changed after it was built, so requests may hold it while another version is served.
    """

    def __init__(self, vectors: Vectors, index: IndexName, backend: Backend) -> None:
        self.vectors = vectors
        self._rows = {user: row for row, user in enumerate(vectors.user_keys)}
        self._index = make_index(index, vectors.items, backend)
        self._by_popularity = np.lexsort((np.arange(len(vectors.item_ids)), -vectors.popularity))

    @property
    def num_bytes(self) -> int:
        """Bytes of the vectors that are searched."""
        return self.vectors.users.nbytes + self.vectors.items.nbytes

    def rows(self, item_ids: I64) -> I64:
        """Look up the rows of the known ids, ascending and distinct."""
        return np.unique(rows_of(self.vectors.item_ids, item_ids))

    def knows(self, user: UserKey) -> bool:
        """Whether the vectors have a row of the user."""
        return user in self._rows

    def search_for(
        self,
        user: UserKey,
        k: int,
        exclude_seen: bool,
        allow_items: I64 | None,
        deny_items: I64 | None,
        history: I64 = NO_ITEMS,
    ) -> MatchQuery:
        """Decide how to search for a user. Unknown item ids are ignored.

        Args:
            user: need not be known.
            k: most items to find.
            exclude_seen: leave out the items of the training and of `history`, and near-duplicates
                of what the user owns.
            allow_items: the only item ids that may be found; None: all.
            deny_items: item ids that must not be found; None: none.
            history: the user's item ids of both domains, oldest first; those of the training may be
                left out.
        """
        row = self._rows.get(user, -1)
        events = rows_of(self.vectors.item_ids, history)
        trained_events = self._trained_on(row)
        trained_on = np.unique(trained_events)
        owned, new_owned = self._owned(row, history)
        history = np.union1d(trained_on, events)
        hidden = NO_ITEMS
        if exclude_seen:
            source = self.vectors.source
            hidden = (
                history if source is None else np.union1d(history, source.near_duplicates(owned))
            )
        if deny_items is not None:
            hidden = np.union1d(hidden, self.rows(deny_items))
        allowed = None if allow_items is None else self.rows(allow_items)
        folding = self.vectors.folding
        if folding is not None and folding.decay is not None and len(events):
            earlier = trained_events[~np.isin(trained_events, events)]
            learnt = folding.trained(np.concatenate([earlier, events]))
            if len(learnt) and not np.array_equal(learnt, trained_events):
                return MatchQuery(Basis.FOLDED, row, k, hidden, allowed, learnt)
        elif folding is not None and (len(history) > len(trained_on) or new_owned):
            learnt = folding.trained(history)
            if new_owned or len(np.setdiff1d(learnt, trained_on, assume_unique=True)):
                return MatchQuery(Basis.FOLDED, row, k, hidden, allowed, learnt, owned)
        return MatchQuery(self._trained_basis(row), row, k, hidden, allowed)

    def _owned(self, row: int, history: I64) -> tuple[I64, bool]:
        """List the source's items of a user, ascending, and whether the history has some that the training did not."""
        source = self.vectors.source
        if source is None:
            return NO_ITEMS, False
        trained_on = source.seen(row)
        owned = np.union1d(trained_on, source.rows(history))
        return owned, len(owned) > len(trained_on)

    def _trained_on(self, row: int) -> I64:
        """List the item rows that the training saw of a user, in its order; row -1: none."""
        if row < 0:
            return NO_ITEMS
        vectors = self.vectors
        return vectors.seen_items[slice(*vectors.seen_starts[row : row + 2])].astype(np.int64)

    def _trained_basis(self, row: int) -> Basis:
        """Choose the basis of a user whose history has nothing new."""
        if row >= 0 and self.vectors.in_target[row]:
            return Basis.TARGET
        if row >= 0 and self.vectors.in_source[row]:
            return Basis.SOURCE
        return Basis.POPULARITY

    def run(self, queries: Sequence[MatchQuery]) -> list[MatchedItems]:
        """Answer the queries. All that have a vector and no allow list share one index search."""
        together = [
            query
            for query in queries
            if query.basis is not Basis.POPULARITY and query.allowed is None
        ]
        found = iter(self._search_all(together) if together else [])
        answers = []
        for query in queries:
            if query.basis is Basis.POPULARITY:
                answers.append(self._popular(query))
            else:
                answers.append(
                    next(found) if query.allowed is None else self._search_allowed(query)
                )
        return answers

    def _vector(self, query: MatchQuery) -> F32:
        if query.history is None:
            vector: F32 = self.vectors.users[query.user]
            return vector
        assert self.vectors.folding is not None
        return self.vectors.folding.vector(query.user, query.history, query.source_history)

    def _search_all(self, queries: list[MatchQuery]) -> list[MatchedItems]:
        """Search all items, for many queries at once."""
        vectors = torch.from_numpy(np.stack([self._vector(query) for query in queries]))
        hidden = Hidden.of([query.hidden for query in queries])
        best = self._index.search(vectors, max(query.k for query in queries), hidden)
        answers = []
        for query, rows, scores in zip(
            queries, best.items.numpy(), best.scores.numpy(), strict=True
        ):
            num_found = min(query.k, int(np.count_nonzero(rows >= 0)))
            # Copies: a view would keep the answers of the whole batch alive.
            answers.append(MatchedItems(rows[:num_found].copy(), scores[:num_found].copy()))
        return answers

    def _search_allowed(self, query: MatchQuery) -> MatchedItems:
        """Score the few allowed items one by one, without the index."""
        assert query.allowed is not None
        rows = np.setdiff1d(query.allowed, query.hidden, assume_unique=True)
        scores = self.vectors.items[rows] @ self._vector(query)
        order = np.argsort(-scores, kind="stable")[: query.k]
        return MatchedItems(rows[order], scores[order])

    def _popular(self, query: MatchQuery) -> MatchedItems:
        off = np.zeros(len(self._by_popularity), np.bool_)
        if query.allowed is not None:
            off[:] = True
            off[query.allowed] = False
        off[query.hidden] = True
        rows = self._by_popularity[~off[self._by_popularity]][: query.k]
        return MatchedItems(rows, self.vectors.popularity[rows].astype(np.float32))
