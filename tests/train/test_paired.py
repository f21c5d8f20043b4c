"""A model beside the strongest baseline: an interval by user, and a warning where it does not win."""

from __future__ import annotations

import numpy as np
import pytest

from npu_gr.train.next_item import NO_RANKS, NextItemRanks
from npu_gr.train.paired import compare, difference, difference_of_users


def ranks(share: float, num_users: int = 1000) -> NextItemRanks:
    """The first users hit at rank 0, the others miss."""
    found = np.where(np.arange(num_users) < share * num_users, 0.0, 50.0)
    return NextItemRanks(found, found)


def test_users_drawn_by_their_gap_are_users_drawn_one_by_one() -> None:
    random = np.random.default_rng(0)
    ours, theirs = random.integers(0, 2, 300).astype(np.float64), random.integers(0, 2, 300).astype(np.float64) / 2
    fast, slow = difference_of_users(ours, theirs), difference(ours[None], theirs[None])
    assert fast.mean == pytest.approx(slow.mean)
    assert (fast.low, fast.high) == pytest.approx((slow.low, slow.high), abs=0.01)


def test_the_strongest_baseline_is_named_and_a_win_has_no_warning() -> None:
    found = compare("ours", ranks(0.3), {"weak": ranks(0.01), "strong": ranks(0.2), "other": ranks(0.1)})
    assert found is not None
    assert (found.baseline, found.is_better) == ("strong", True)
    assert found.differences["HR@10"].mean == pytest.approx(0.1)
    assert found.differences["HR@10"].low > 0.07
    assert "strong, the strongest baseline" in found.text()
    assert "WARNING" not in found.text()


def test_a_tie_and_a_loss_are_warned_of() -> None:
    for share in (0.2, 0.1):
        found = compare("ours", ranks(share), {"strong": ranks(0.2)})
        assert found is not None
        assert not found.is_better
        assert "WARNING: ours is not shown to be better than strong" in found.text()


def test_without_users_there_is_nothing_to_compare() -> None:
    assert compare("ours", NO_RANKS, {"strong": NO_RANKS}) is None
