"""One version of the vectors, ready to answer: who a user is, and the best items for many users at once.

A user is found by the first of these that applies; the answer says which:
  folded      target history with items that the training did not know of: a vector made from all of it, see `fold.py`
  target      target history: the user's target vector against the item vectors
  source      source history only: the source vector against the bridge's item vectors
  popularity  neither: the items with most target edges
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from npu_gr.backend.base import Backend
from npu_gr.backend.best_items import Hidden
from npu_gr.core.request import F32, I64, Basis
from npu_gr.matching.index import Index, IndexName, make_index
from npu_gr.matching.vectors import Vectors

_NO_ITEMS: I64 = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """One user's search."""

    basis: Basis
    user: int  # row; -1: unknown
    k: int
    hidden: I64  # item rows that are not to be found, rising and distinct
    allowed: I64 | None = None  # the only item rows that may be found, rising and distinct
    history: I64 | None = None  # FOLDED: item rows that the vector is made from


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Best first; of equals the lower row first. At most k."""

    items: I64  # [n] rows
    scores: F32  # [n]


class Matcher:
    """Never changed after it was built, so requests may hold it while another version is served."""

    def __init__(self, vectors: Vectors, index: IndexName, backend: Backend) -> None:
        self.vectors = vectors
        self._users = {name: row for row, name in enumerate(vectors.user_names)}
        self._tables: dict[Basis, tuple[F32, F32, Index]] = {
            Basis.TARGET: (vectors.users, vectors.items, make_index(index, vectors.items, backend))
        }
        if vectors.source_users is not None and vectors.bridge_items is not None:
            found = make_index(index, vectors.bridge_items, backend)
            self._tables[Basis.SOURCE] = (vectors.source_users, vectors.bridge_items, found)
        self._by_popularity = np.lexsort((np.arange(len(vectors.item_ids)), -vectors.popularity))

    @property
    def num_bytes(self) -> int:
        """Of the vectors that are searched."""
        return sum(users.nbytes + items.nbytes for users, items, _ in self._tables.values())

    def rows(self, item_ids: I64) -> I64:
        """Rows of the ids that are known, rising and distinct."""
        known = self.vectors.item_ids
        places = np.searchsorted(known, item_ids)
        places[places == len(known)] = 0
        return np.unique(places[known[places] == item_ids])

    def search_for(
        self,
        user: str,
        k: int,
        exclude_seen: bool,
        allow_items: I64 | None,
        deny_items: I64 | None,
        history: I64 = _NO_ITEMS,
    ) -> Search:
        """What to search for a user by name; ids that are not known count for nothing."""
        row = self._users.get(user, -1)
        seen = self._seen(row)
        history = np.union1d(seen, self.rows(history))
        hidden = history if exclude_seen else _NO_ITEMS
        if deny_items is not None:
            hidden = np.union1d(hidden, self.rows(deny_items))
        allowed = None if allow_items is None else self.rows(allow_items)
        if (folding := self.vectors.folding) is not None and len(history) > len(seen):
            learnt = folding.trained(history)
            if len(np.setdiff1d(learnt, seen, assume_unique=True)):
                return Search(Basis.FOLDED, row, k, hidden, allowed, learnt)
        return Search(self._basis(row), row, k, hidden, allowed)

    def _seen(self, row: int) -> I64:
        """Item rows that the training knew of, rising and distinct."""
        if row < 0:
            return _NO_ITEMS
        vectors = self.vectors
        return np.unique(vectors.seen_items[slice(*vectors.seen_starts[row : row + 2])].astype(np.int64))

    def _basis(self, row: int) -> Basis:
        """What is there of a user without anything new."""
        if row >= 0 and self.vectors.in_target[row]:
            return Basis.TARGET
        if row >= 0 and self.vectors.in_source[row] and Basis.SOURCE in self._tables:
            return Basis.SOURCE
        return Basis.POPULARITY

    def run(self, searches: Sequence[Search]) -> list[Found]:
        """The searches, those of a basis that look at every item in one pass over the items."""
        answers: list[Found | None] = [None] * len(searches)
        for basis in self._tables:
            wide = [n for n, search in enumerate(searches) if _space(search) is basis and search.allowed is None]
            if wide:
                for n, found in zip(wide, self._wide(basis, [searches[n] for n in wide]), strict=True):
                    answers[n] = found
        return [
            answer or (self._popular(search) if search.basis is Basis.POPULARITY else self._narrow(search))
            for search, answer in zip(searches, answers, strict=True)
        ]

    def _vector(self, search: Search) -> F32:
        if search.history is None:
            vector: F32 = self._tables[search.basis][0][search.user]
            return vector
        assert self.vectors.folding is not None
        return self.vectors.folding.vector(search.user, search.history)

    def _wide(self, basis: Basis, searches: list[Search]) -> list[Found]:
        index = self._tables[basis][2]
        queries = torch.from_numpy(np.stack([self._vector(search) for search in searches]))
        lengths = [len(search.hidden) for search in searches]
        items = np.concatenate([search.hidden for search in searches])
        order = np.argsort(items, kind="stable")
        who = np.repeat(np.arange(len(searches)), lengths)
        hidden = Hidden(torch.from_numpy(who[order]), torch.from_numpy(items[order])) if len(items) else None
        best = index.search(queries, max(search.k for search in searches), hidden)
        found = []
        for search, rows, scores in zip(searches, best.items.numpy(), best.scores.numpy(), strict=True):
            num = min(search.k, int(np.count_nonzero(rows >= 0)))
            found.append(Found(rows[:num].copy(), scores[:num].copy()))
        return found

    def _narrow(self, search: Search) -> Found:
        """Among a few items: each is scored."""
        assert search.allowed is not None
        items = self._tables[_space(search)][1]
        rows = np.setdiff1d(search.allowed, search.hidden, assume_unique=True)
        scores = items[rows] @ self._vector(search)
        order = np.argsort(-scores, kind="stable")[: search.k]
        return Found(rows[order], scores[order])

    def _popular(self, search: Search) -> Found:
        off = np.zeros(len(self._by_popularity), np.bool_)
        if search.allowed is not None:
            off[:] = True
            off[search.allowed] = False
        off[search.hidden] = True
        rows = self._by_popularity[~off[self._by_popularity]][: search.k]
        return Found(rows, self.vectors.popularity[rows].astype(np.float32))


def _space(search: Search) -> Basis:
    """Whose items the search's vector is compared with."""
    return Basis.TARGET if search.basis is Basis.FOLDED else search.basis
