"""One version of the vectors, ready to answer: who a user is, and the best items for many users at once.

A user is found by the first of these that applies; the answer says which:
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
from npu_gr.matching.index import Index, IndexName, make_index
from npu_gr.matching.vectors import Vectors
from npu_gr.request import F32, I64, Basis


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """One user's search."""

    basis: Basis
    user: int  # row; -1: unknown
    k: int
    hidden: I64  # item rows that are not to be found, rising and distinct
    allowed: I64 | None = None  # the only item rows that may be found, rising and distinct


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
        self, user: str, k: int, exclude_seen: bool, allow_items: I64 | None, deny_items: I64 | None
    ) -> Search:
        """What to search for a user by name; ids that are not known count for nothing."""
        vectors, row = self.vectors, self._users.get(user, -1)
        hidden: I64 = np.empty(0, np.int64)
        basis = Basis.POPULARITY
        if row >= 0:
            if vectors.in_target[row]:
                basis = Basis.TARGET
            elif vectors.in_source[row] and Basis.SOURCE in self._tables:
                basis = Basis.SOURCE
            if exclude_seen:
                hidden = vectors.seen_items[slice(*vectors.seen_starts[row : row + 2])].astype(np.int64)
        if deny_items is not None:
            hidden = np.concatenate((hidden, self.rows(deny_items)))
        allowed = None if allow_items is None else self.rows(allow_items)
        return Search(basis, row, k, np.unique(hidden), allowed)

    def run(self, searches: Sequence[Search]) -> list[Found]:
        """The searches, those of a basis that look at every item in one pass over the items."""
        answers: list[Found | None] = [None] * len(searches)
        for basis in self._tables:
            wide = [n for n, search in enumerate(searches) if search.basis is basis and search.allowed is None]
            if wide:
                for n, found in zip(wide, self._wide(basis, [searches[n] for n in wide]), strict=True):
                    answers[n] = found
        return [
            answer or (self._popular(search) if search.basis is Basis.POPULARITY else self._narrow(search))
            for search, answer in zip(searches, answers, strict=True)
        ]

    def _wide(self, basis: Basis, searches: list[Search]) -> list[Found]:
        users, _, index = self._tables[basis]
        queries = torch.from_numpy(users[[search.user for search in searches]])
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
        users, items, _ = self._tables[search.basis]
        rows = np.setdiff1d(search.allowed, search.hidden, assume_unique=True)
        scores = items[rows] @ users[search.user]
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
