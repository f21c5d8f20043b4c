"""Users with new items are matched by a folded vector.

The vector itself is checked by tests/train/match/test_model.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.core.arrays import I64
from npu_gr.core.history import UserKey
from npu_gr.core.request import Basis
from npu_gr.vector_search.fold import Folding
from npu_gr.vector_search.matcher import Matcher
from npu_gr.vector_search.vectors import load, save
from tests.vector_search.vectors import COLD, FIRST_ID, KNOWN, make_vectors


def make_folding(num_users: int = 3, num_items: int = 40) -> Folding:
    random = np.random.default_rng(1)

    def rows(*shape: int) -> Any:
        return random.integers(-3, 4, shape).astype(np.float32)

    degrees = np.ones(num_items, np.int64)
    degrees[20] = 0
    return Folding(
        users=rows(num_users, 8),
        states=rows(2, num_items, 8),
        matrices=rows(2, 16, 8),
        degrees=degrees,
        norm="mean",
        activation="none",
    )


def ids(*rows: int) -> I64:
    return np.array([row * 2 + FIRST_ID for row in rows], np.int64)


def test_who_is_folded_and_what_is_found(tmp_path: Path) -> None:
    save(make_vectors(folding=make_folding()), tmp_path)
    vectors = load(tmp_path)
    matcher = Matcher(vectors, "exact", CPUBackend())
    assert vectors.folding is not None

    def search(user: str, *rows: int, **changes: Any) -> Any:
        asked: dict[str, Any] = {
            "exclude_seen": True,
            "allow_items": None,
            "deny_items": None,
        } | changes
        return matcher.search_for(UserKey("", user), 6, history=ids(*rows), **asked)

    assert search("unknown").basis is Basis.POPULARITY
    # an item that learnt nothing, one that is unknown
    assert search("unknown", 20, -3).basis is Basis.POPULARITY
    assert search(KNOWN, 1, 5).basis is Basis.TARGET  # nothing that the training did not know
    assert search(COLD).basis is Basis.SOURCE
    unknown, known, cold = search("unknown", 9, 3, 9, 20), search(KNOWN, 9), search(COLD, 3)
    assert [s.basis for s in (unknown, known, cold)] == [Basis.FOLDED] * 3
    assert known.history.tolist() == [1, 5, 7, 9]  # with what it had when trained
    assert unknown.hidden.tolist() == [3, 9, 20]
    few = search("unknown", 9, 3, allow_items=ids(3, 4, 6), exclude_seen=False)
    answers = matcher.run([unknown, search(KNOWN), known, few])
    for asked, found in zip((unknown, known), (answers[0], answers[2]), strict=True):
        scores = vectors.items @ vectors.folding.vector(asked.user, asked.history)
        best = [row for row in np.argsort(-scores, kind="stable") if row not in asked.hidden][:6]
        assert found.items.tolist() == best
    assert sorted(answers[3].items.tolist()) == [3, 4, 6]


def test_without_a_folding_users_stay_as_they_were_trained() -> None:
    matcher = Matcher(make_vectors(), "exact", CPUBackend())
    found = matcher.search_for(UserKey("", "unknown"), 5, True, None, None, ids(3, 9))
    assert found.basis is Basis.POPULARITY
    assert found.hidden.tolist() == [3, 9]
