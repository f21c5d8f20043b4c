"""A split trains on the oldest events only; batches have every trained event once."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from npu_gr.core.errors import DataError
from npu_gr.history_store.interactions import Interactions, ItemValues
from npu_gr.train.data import InteractionLog, Split, batches, build_log, windows
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
    assert parts[:, 1].max() <= 16
    seen = []
    for batch in batches(log, parts, 64, random):
        assert batch.items.numel() <= 64
        seen += batch.events[batch.valid].tolist()
        assert np.array_equal(batch.items[batch.valid], log.items[batch.events[batch.valid]])
    assert sorted(seen) == np.flatnonzero(log.trained).tolist()


def cut_one_by_one(
    log: InteractionLog, window_tokens: int, random: np.random.Generator
) -> list[list[int]]:
    """Cut the windows user by user: the definition of `windows`."""
    found = []
    for start, trained in zip(log.starts.tolist(), log.num_trained.tolist(), strict=False):
        first = window_tokens
        if trained > window_tokens:
            first = int(random.integers(1, window_tokens + 1))
        cuts = [0, *range(first, trained, window_tokens), trained]
        found += [[start + a, b - a] for a, b in pairwise(cuts) if b > a]
    return found


@pytest.mark.parametrize("window_tokens", [1, 2, 7, 700])
def test_windows_are_those_cut_user_by_user(window_tokens: int) -> None:
    log = build_log(uneven(), [], "time")
    log.num_trained[[2, 9]] = 0
    random, other = np.random.default_rng(3), np.random.default_rng(3)
    want = cut_one_by_one(log, window_tokens, other)
    assert windows(log, window_tokens, random).tolist() == want
    assert random.bit_generator.state == other.bit_generator.state


def test_an_epoch_of_batches_is_not_held_in_memory() -> None:
    few, many = 40_000, 160_000
    most = 4 * (many - few)  # bytes; the batches have 33 an event
    assert peak_bytes_of_an_epoch(many) - peak_bytes_of_an_epoch(few) < most


def peak_bytes_of_an_epoch(num_events: int) -> int:
    zeros = np.zeros(num_events, np.int64)
    log = InteractionLog(
        items=zeros,
        actions=zeros,
        times=zeros,
        starts=np.arange(0, num_events + 1, 400),
        num_trained=np.full(num_events // 400, 400),
        item_ids=zeros[:1],
        action_values=(1.0,),
    )
    random = np.random.default_rng(0)
    tracemalloc.start()
    held = batches(log, windows(log, 100, random), 4000, random)
    num_read = sum(int(batch.valid.sum()) for batch in held)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_read == num_events
    return peak


def test_a_log_without_a_test_part_is_rejected() -> None:
    with pytest.raises(DataError, match="1 interactions: the time split leaves 0 to train on"):
        build_log(planted()[:1], [], "time")
