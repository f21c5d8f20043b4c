"""Answers `match` requests from one version of the vectors, for many users at a time.

The basis of an answer, which the answer names, is the first of these that applies to the user:
  folded      the history has items that were not in the training: a vector is computed from the
              whole history (`fold.py`)
  target      the training had target history of the user: the trained vector is used
  source      the training had only source history of the user: the trained vector is used
  popularity  none of these: the items with the most target edges

An index finds the items with the highest inner product: exactly, or approximately for catalogues
that are too large for an exact pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from npu_gr.backend.base import Backend
from npu_gr.backend.best_items import Hidden
from npu_gr.core.arrays import F32, I64
from npu_gr.core.history import UserKey
from npu_gr.core.request import Basis
from npu_gr.vector_search.config import IndexName
from npu_gr.vector_search.fold import NO_ITEMS, rows_of
from npu_gr.vector_search.index import ExactIndex, ExactSteps, Index
from npu_gr.vector_search.ivf import IvfIndex
from npu_gr.vector_search.vectors import Vectors


def make_index(name: IndexName, vectors: Vectors, backend: Backend) -> Index:
    """Build an index of the items. `ivf` takes minutes for tens of millions.

    Args:
        name: exact or ivf.
        vectors: Vectors of items, and of the users by which `ivf` is measured.
        backend: Backend for the exact search.

    Raises:
        ConfigError: faiss, which `ivf` needs, is not installed.
    """
    if name == "exact":
        return ExactIndex(vectors.items, backend)
    users = vectors.users[vectors.in_target | vectors.in_source]
    return IvfIndex(vectors.items, users, ExactIndex(vectors.items, backend))


@dataclass(frozen=True, slots=True, eq=False)
class MatchQuery:
    """The search for one user. Item rows are ascending and distinct."""

    basis: Basis
    user: int  # row; -1 = not in the training
    k: int  # most items to find
    hidden: I64  # item rows that must not be found
    allowed: I64 | None = None  # the only item rows that may be found; None = all
    # rows for `Folding.vector`; only for basis FOLDED
    history: I64 | None = None
    # rows of source items for `Folding.vector`
    source_history: I64 = field(default_factory=lambda: NO_ITEMS)

    def num_allowed(self, num_items: int) -> int:
        """Count the items, of `num_items`, that may be found."""
        if self.allowed is None:
            return num_items - len(self.hidden)
        return len(np.setdiff1d(self.allowed, self.hidden, assume_unique=True))


@dataclass(frozen=True, slots=True, eq=False)
class MatchedItems:
    """At most k items, best first; ties by the lower row."""

    items: I64  # [n] rows
    scores: F32  # [n] inner products; target edges if the basis is POPULARITY


class Matcher:
    """One version of the vectors with its index.

    Immutable, so requests may hold it while another version is served.
    """

    def __init__(self, vectors: Vectors, index: IndexName, backend: Backend) -> None:
        self.vectors = vectors
        self._rows = {user: row for row, user in enumerate(vectors.user_keys)}
        self.is_exact = index == "exact"
        self._index = make_index(index, vectors, backend)
        self._by_popularity = np.lexsort((np.arange(len(vectors.item_ids)), -vectors.popularity))

    @property
    def num_bytes(self) -> int:
        """Bytes of the vectors of users and items."""
        return self.vectors.users.nbytes + self.vectors.items.nbytes

    def rows(self, item_ids: I64) -> I64:
        """Look up the rows of the known ids, ascending and distinct."""
        return np.unique(rows_of(self.vectors.item_ids, item_ids))

    def knows(self, user: UserKey) -> bool:
        """Return whether the vectors have a row of the user."""
        return user in self._rows

    def search_for(
        self,
        user: UserKey,
        k: int,
        exclude_seen: bool,
        allow_items: I64 | None,
        deny_items: I64 | None,
        history: I64 = NO_ITEMS,
        max_folded: int | None = None,
    ) -> MatchQuery:
        """Choose the basis and the filters of the search for a user. Unknown item ids are ignored.

        Args:
            user: The user, known or not.
            k: Most items to find.
            exclude_seen: Hide the user's items, from the training and from `history`, and target
                items that are near-duplicates of the user's source items.
            allow_items: the only item ids that may be found; None = all.
            deny_items: Item ids that must not be found; None = no such item.
            history: the user's item ids of both domains, oldest first; items of the training may be
                omitted.
            max_folded: Number of newest items of `history` from which a vector is computed; None =
                all. All of them are hidden.
        """
        row = self._rows.get(user, -1)
        seen = history
        if max_folded is not None:
            history = history[-max_folded:]
        events = rows_of(self.vectors.item_ids, history)
        trained_events = self._trained_on(row)
        trained_on = np.unique(trained_events)
        owned, new_owned = self._owned(row, history)
        history = np.union1d(trained_on, events)
        hidden = NO_ITEMS
        if exclude_seen:
            source = self.vectors.source
            hidden = np.union1d(history, rows_of(self.vectors.item_ids, seen))
            if source is not None:
                had, _ = self._owned(row, seen)
                hidden = np.union1d(hidden, source.near_duplicates(had))
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
        """List the source rows of a user, ascending, and whether some were not in the training."""
        source = self.vectors.source
        if source is None:
            return NO_ITEMS, False
        trained_on = source.seen(row)
        owned = np.union1d(trained_on, source.rows(history))
        return owned, len(owned) > len(trained_on)

    def _trained_on(self, row: int) -> I64:
        """List the item rows of a user in the training, in its order; none for row -1."""
        if row < 0:
            return NO_ITEMS
        vectors = self.vectors
        return vectors.seen_items[slice(*vectors.seen_starts[row : row + 2])].astype(np.int64)

    def _trained_basis(self, row: int) -> Basis:
        """Return the basis for a user whose history has no new items."""
        if row >= 0 and self.vectors.in_target[row]:
            return Basis.TARGET
        if row >= 0 and self.vectors.in_source[row]:
            return Basis.SOURCE
        return Basis.POPULARITY

    def run(self, queries: Sequence[MatchQuery]) -> list[MatchedItems]:
        """Answer queries. Those with a vector and no allow list share one index search."""
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

    def exactly(self, query: MatchQuery, k: int) -> ExactSteps | None:
        """Begin an exact search for what the index has searched; None = it has not searched."""
        if self.is_exact or query.basis is Basis.POPULARITY or query.allowed is not None:
            return None
        return ExactSteps(self.vectors.items, self._vector(query), k, query.hidden)

    def _vector(self, query: MatchQuery) -> F32:
        if query.history is None:
            vector: F32 = self.vectors.users[query.user]
            return vector
        assert self.vectors.folding is not None
        return self.vectors.folding.vector(query.user, query.history, query.source_history)

    def _search_all(self, queries: list[MatchQuery]) -> list[MatchedItems]:
        """Search all items, for many queries at a time."""
        vectors = torch.from_numpy(np.stack([self._vector(query) for query in queries]))
        hidden = Hidden.of([query.hidden for query in queries])
        best = self._index.search(vectors, max(query.k for query in queries), hidden)
        answers = []
        for query, rows, scores in zip(
            queries, best.items.numpy(), best.scores.numpy(), strict=True
        ):
            num_found = min(query.k, int(np.count_nonzero(rows >= 0)))
            # Copied, since a view would keep the results of the whole batch in memory.
            answers.append(MatchedItems(rows[:num_found].copy(), scores[:num_found].copy()))
        return answers

    def _search_allowed(self, query: MatchQuery) -> MatchedItems:
        """Score only the allowed items, without the index."""
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
