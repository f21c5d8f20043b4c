"""Converted logs hold what their sources say: times and histories of real users."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from npu_gr.core.errors import DataError
from npu_gr.history_store.interactions import Interactions
from npu_gr.replay.convert import ModelVocabulary, from_ratings
from npu_gr.replay.files import read, write

NUM_USERS, NUM_ITEMS = 7, 400


def ratings() -> Interactions:
    """Users with 10 to 130 events."""
    random = np.random.default_rng(0)
    users = random.permutation(np.repeat(np.arange(NUM_USERS), np.arange(NUM_USERS) * 20 + 10))
    return Interactions(
        users.astype(np.int32),
        random.integers(0, NUM_ITEMS, len(users)),
        random.integers(1, 6, len(users)).astype(np.float64),
        np.sort(random.integers(800_000_000, 900_000_000, len(users))),
        [f"user-{i}" for i in range(NUM_USERS)],
    )


CATALOGUE = ModelVocabulary(
    item_ids=np.arange(NUM_ITEMS, dtype=np.int64), action_values=(1.0, 2.0, 3.0, 4.0, 5.0)
)


def test_ratings_become_ranks_with_events_that_follow(tmp_path: Path) -> None:
    log = ratings()
    heldout = log[np.arange(len(log)) >= 300]
    records = from_ratings(heldout, CATALOGUE)
    write(tmp_path / "r.jsonl", records)
    assert list(read(tmp_path / "r.jsonl")) == records
    users = dict.fromkeys(record.user_id for record in records)
    for user in users:
        own = [record for record in records if record.user_id == user]
        assert [record.kind for record in own] == ["rank", "events"] * (len(own) // 2)
        happened = []
        for rank, event in zip(own[::2], own[1::2], strict=True):
            assert event.events is not None
            items = event.events.events().items.tolist()
            clicked = [
                item
                for item, label in zip(rank.candidate_ids(), rank.labels["click"], strict=True)
                if label
            ]
            assert sorted(items) == sorted(clicked)
            assert len(rank.candidate_ids()) == 100
            happened += items
        assert happened == heldout.items[heldout.users == log.user_names.index(user)].tolist()
    strange = ModelVocabulary(item_ids=CATALOGUE.item_ids, action_values=(1.0,))
    with pytest.raises(DataError, match="not an action of the model"):
        from_ratings(heldout, strange)
