"""Small vectors to serve: who has which history, and seeded numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from npu_gr.core.history import UserKey
from npu_gr.vector_search.fold import SourceItems
from npu_gr.vector_search.vectors import Vectors

FIRST_ID = 100  # external ids are rows x 2 + this; those of the source's items are 11, 13 and 15
# target rows that are near-duplicates of what each user has in the source
NEAR_DUPLICATES = {"known": {6}, "cold": {8, 9}}
KNOWN, COLD = "known", "cold"  # users: with target history; with source history only


def make_vectors(num_items: int = 40, seed: int = 0, **changes: Any) -> Vectors:
    random = np.random.default_rng(seed)

    def rows(n: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return random.integers(-3, 4, (n, 8)).astype(np.float32)

    fields: dict[str, Any] = {
        "user_keys": [UserKey("", name) for name in (KNOWN, COLD, "none's")],
        "item_ids": np.arange(num_items, dtype=np.int64) * 2 + FIRST_ID,
        "users": rows(3),
        "items": rows(num_items),
        "in_target": np.array([True, False, False]),
        "in_source": np.array([True, True, False]),
        "popularity": random.integers(0, 9, num_items),
        "seen_starts": np.array([0, 3, 3, 3]),
        "seen_items": np.array([1, 5, 7], np.int32),
        "figures": {"hit_50": 0.1},
        "source": SourceItems(
            ids=np.array([11, 13, 15], np.int64),
            seen_starts=np.array([0, 1, 3, 3]),
            seen_items=np.array([2, 0, 1], np.int32),
            near_duplicate_starts=np.array([0, 2, 2, 3]),
            near_duplicate_items=np.array([8, 9, 6], np.int32),
        ),
    }
    return Vectors(**fields | changes)
