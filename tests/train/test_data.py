"""A split trains on the oldest events only; batches have every trained event once."""

from __future__ import annotations

import numpy as np
import pytest

from npu_gr.core.errors import DataError
from npu_gr.history_store.interactions import Interactions, ItemValues
from npu_gr.train.data import Split, batches, build_log, windows
from tests.train.synthetic import planted


def uneven(seed: int = 0) -> Interactions:
    random = np.random.default_rng(seed)
    users = np.sort(random.zipf(1.4, 700).clip(max=20) - 1)
    times = np.sort(random.integers(0, 300, 700))  # ties on purpose
    return Interactions(
        random.permutation(users).astype(np.int32),
        random.integers(0, 40, 700) * 3,
        random.integers(1, 6, 700).astype(np.float64),
        times,
        [f"u{user}" for user in range(20)],
    )


def test_the_time_split_cuts_the_whole_log_at_one_instant() -> None:
    log = build_log(uneven(), [], "time")
    assert log.times[log.trained].max() < log.times[~log.trained].min()
    assert abs(log.trained.mean() - 0.8) < 0.02


def test_leave_one_out_keeps_the_last_event_of_each_user() -> None:
    log = build_log(planted(), [], "leave-one-out")
    assert (np.diff(log.starts) - log.num_trained == 1).all()
    assert [at for _, at in log.next_items()] == (log.starts[1:] - 1).tolist()


def test_the_user_time_split_keeps_back_a_fifth_of_every_user() -> None:
    log = build_log(uneven(), [], "user-time")
    counts = np.diff(log.starts)
    assert (counts - log.num_trained).tolist() == [-(-count // 5) for count in counts.tolist()]


@pytest.mark.parametrize("split", ["user-time", "time", "leave-one-out"])
def test_validation_never_sees_the_test_part(split: Split) -> None:
    log = build_log(uneven(), [], split)
    inner = log.only_trained(split)
    assert len(inner.items) == log.trained.sum()
    assert np.array_equal(inner.items, log.items[log.trained])
    assert np.array_equal(inner.users, log.users[log.trained])
    assert (inner.num_trained <= log.num_trained).all()


def test_events_keep_their_user_item_and_order() -> None:
    raw = uneven()
    log = build_log(raw, [ItemValues("genre", ["a"], {1: [0]})], "time")
    assert 1 in log.item_ids
    for user in range(20):
        part = slice(log.starts[user], log.starts[user + 1])
        assert np.array_equal(log.item_ids[log.items[part]], raw.items[raw.users == user])
        assert np.array_equal(log.values[part], raw.values[raw.users == user])


def test_batches_cover_the_trained_events_once_within_their_limit() -> None:
    log = build_log(uneven(), [], "time")
    random = np.random.default_rng(0)
    parts = windows(log, 16, random)
    assert max(part.num_tokens for part in parts) <= 16
    seen = []
    for batch in batches(log, parts, 64, random):
        assert batch.items.numel() <= 64
        seen += batch.events[batch.valid].tolist()
        assert np.array_equal(batch.items[batch.valid], log.items[batch.events[batch.valid]])
    assert sorted(seen) == np.flatnonzero(log.trained).tolist()


def test_a_log_without_a_test_part_is_rejected() -> None:
    with pytest.raises(DataError, match="1 interactions: the time split leaves 0 to train on"):
        build_log(planted()[:1], [], "time")
