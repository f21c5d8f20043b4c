"""Epochs vary: shares hold, swaps are counted transitions, events stay in their order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.train.data import Augmentation, InteractionLog, build_log, windows
from tests.train.synthetic import planted


def log_of(histories: list[list[int]], num_trained: list[int]) -> InteractionLog:
    items = np.array([item for history in histories for item in history], np.int64)
    return InteractionLog(
        items=items,
        actions=np.arange(len(items)) % 3,
        times=np.arange(len(items)),
        starts=np.cumsum([0, *map(len, histories)]),
        num_trained=np.array(num_trained),
        item_ids=np.arange(9),
        action_values=(1.0, 2.0, 3.0),
    )


@given(
    st.lists(st.lists(st.integers(0, 8), max_size=6), min_size=1, max_size=6),
    st.floats(0, 0.99),
    st.floats(0, 1),
    st.integers(0, 99),
)
def test_what_is_drawn_is_of_the_log(
    histories: list[list[int]], skip_ratio: float, swap_ratio: float, seed: int
) -> None:
    """Any draw has trained events in their order; swapped items followed the one before."""
    trained = [max(0, len(history) - 1) for history in histories]
    log = log_of(histories, trained)
    drawn = Augmentation(log, skip_ratio, swap_ratio).draw(log, np.random.default_rng(seed))
    if not skip_ratio and not swap_ratio:
        assert drawn is log
        return
    follows = {
        (own[a], own[b])
        for own in (history[:count] for history, count in zip(histories, trained, strict=True))
        for a in range(len(own))
        for b in range(a + 1, min(a + 3, len(own)))
    }
    assert np.array_equal(drawn.num_trained, np.diff(drawn.starts))
    for user, (history, count) in enumerate(zip(histories, trained, strict=True)):
        mine = slice(drawn.starts[user], drawn.starts[user + 1])
        # the time of an event is its place in the log
        places = drawn.times[mine] - log.starts[user]
        assert (np.diff(places) > 0).all()
        assert ((places >= 0) & (places < count)).all()
        for place, item in zip(places.tolist(), drawn.items[mine].tolist(), strict=True):
            assert item == history[place] or (place and (history[place - 1], item) in follows)
    assert np.array_equal(drawn.actions, log.actions[drawn.times])


def test_shares_are_those_that_were_asked_for_and_differ_from_epoch_to_epoch() -> None:
    log = build_log(planted(num_users=200), [], "leave-one-out")
    random = np.random.default_rng(0)
    num_trained = int(log.trained.sum())
    skipping, swapping = Augmentation(log, 0.25, 0.0), Augmentation(log, 0.0, 0.5)
    first, second = skipping.draw(log, random), skipping.draw(log, random)
    assert len(first.items) / num_trained == pytest.approx(0.75, abs=0.02)
    assert len(first.items) != len(second.items) or not np.array_equal(first.items, second.items)
    kept = swapping.draw(log, random)
    assert len(kept.items) == num_trained
    changed = (kept.items != log.items[log.trained]).mean()
    assert 0.05 < changed < 0.5  # a swap often draws the item that was there
    firsts = kept.starts[:-1]
    assert np.array_equal(kept.items[firsts], log.items[log.starts[:-1]])


def test_a_user_of_whom_nothing_is_kept_has_no_window() -> None:
    log = log_of([[1, 2, 3], [4, 5]], [2, 1])
    drawn = replace(
        log, items=log.items[:0], starts=np.zeros(3, np.int64), num_trained=np.zeros(2, np.int64)
    )
    assert len(windows(drawn, 4, np.random.default_rng(0))) == 0
