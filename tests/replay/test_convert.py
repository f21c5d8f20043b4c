"""Converted logs hold what their sources say: times and histories of real users."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.core.errors import DataError
from npu_gr.features.interactions import Interactions
from npu_gr.replay.convert import (
    ModelVocabulary,
    from_ratings,
    users_of,
)
from npu_gr.replay.files import read

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


CATALOGUE = ModelVocabulary(item_ids=np.arange(NUM_ITEMS, dtype=np.int64), action_values=(1.0, 2.0, 3.0, 4.0, 5.0))


def test_ratings_become_ranks_with_their_histories_or_with_events_that_follow() -> None:
    log = ratings()
    old = np.arange(len(log)) < 300
    whole = from_ratings(log[~old], CATALOGUE, before=log[old])
    stored = from_ratings(log[~old], CATALOGUE)
    assert {record.kind for record in whole} == {"rank"}
    ranks = [record for record in stored if record.kind == "rank"]
    assert [r.candidate_ids().tolist() for r in ranks] == [r.candidate_ids().tolist() for r in whole]
    seen = {name: part.items.tolist() for name, part in users_of(log[old])}
    for rank, event in zip(whole, [r for r in stored if r.kind == "events"], strict=True):
        assert rank.history is not None
        assert event.events is not None
        assert rank.user_id == event.user_id
        assert rank.history.events().items.tolist() == seen.get(rank.user_id, [])
        seen.setdefault(rank.user_id, []).extend(event.events.events().items.tolist())
    strange = ModelVocabulary(item_ids=CATALOGUE.item_ids, action_values=(1.0,))
    with pytest.raises(DataError, match="none of the model's actions"):
        from_ratings(log[~old], strange)


def test_the_commands_write_logs_that_are_read_back(tmp_path: Path) -> None:
    log = ratings()
    lines = [
        f"{log.user_names[u]}\t{i}\t{v}\t{t}"
        for u, i, v, t in zip(log.users, log.items, log.values, log.timestamps, strict=True)
    ]
    header = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
    (tmp_path / "r.inter").write_text("\n".join([header, *lines]))
    files = {name: str(tmp_path / name) for name in ("r.inter", "r.jsonl")}

    def convert(*words: str) -> None:
        done = CliRunner().invoke(main, ["replay", "convert", *words])
        assert done.exit_code == 0, done.output

    convert("ratings", files["r.inter"], "--out", files["r.jsonl"], "--stored")
    assert {record.kind for record in read(Path(files["r.jsonl"]))} == {"rank", "events"}
