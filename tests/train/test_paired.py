"""Compare a model with the strongest baseline, and warn if it is not better."""

from __future__ import annotations

import numpy as np
import pytest

from npu_gr.train.metrics import auc, difference, difference_of_auc, difference_of_users
from npu_gr.train.next_item import NO_RANKS, NextItemRanks, compare


def ranks(
    share: float, num_users: int = 1000, unseen: float | None = None, repeats: float = 0.0
) -> NextItemRanks:
    """The first users hit at rank 0, the others miss; of the unseen items another share may hit."""
    users = np.arange(num_users)
    overall, among_unseen = (
        np.where(users < part * num_users, 0.0, 50.0)
        for part in (share, share if unseen is None else unseen)
    )
    return NextItemRanks(overall, among_unseen, users < repeats * num_users)


def test_users_drawn_by_their_gap_are_users_drawn_one_by_one() -> None:
    random = np.random.default_rng(0)
    ours, theirs = (
        random.integers(0, 2, 300).astype(np.float64),
        random.integers(0, 2, 300).astype(np.float64) / 2,
    )
    fast, slow = difference_of_users(ours, theirs), difference(ours[None], theirs[None])
    assert fast.mean == pytest.approx(slow.mean)
    assert (fast.low, fast.high) == pytest.approx((slow.low, slow.high), abs=0.01)


def test_the_strongest_baseline_is_named_and_a_win_has_no_warning() -> None:
    found = compare(
        "ours", ranks(0.3), {"weak": ranks(0.01), "strong": ranks(0.2), "other": ranks(0.1)}
    )
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


def test_where_many_next_items_are_repeats_all_items_are_evaluated() -> None:
    """A baseline that counts seen items wins among all items, so a model has to beat it there."""
    for repeats, strongest, of_what in (
        (0.19, "novel", "unseen items"),
        (0.21, "again", "all items"),
    ):
        baselines = {
            "again": ranks(0.6, unseen=0.1, repeats=repeats),
            "novel": ranks(0.1, unseen=0.2, repeats=repeats),
        }
        found = compare("ours", ranks(0.3, unseen=0.5, repeats=repeats), baselines)
        assert found is not None
        assert found.baseline == strongest
        assert found.is_better is (of_what == "unseen items")
        assert (
            f"evaluated on {of_what}: {repeats:.0%} of the next items are repeats"
        ) in found.text()
        assert found.as_dict()["grounds"] == found.grounds
        assert "(the user had the item before)" in found.grounds
        assert next(iter(found.differences)).endswith("unseen") is (of_what == "unseen items")


def test_without_users_there_is_nothing_to_compare() -> None:
    assert compare("ours", NO_RANKS, {"strong": NO_RANKS}) is None


def test_an_aucs_interval_is_that_of_users_drawn_again() -> None:
    random = np.random.default_rng(0)
    users = np.repeat(np.arange(300), 4)
    taste = random.normal(size=300)[users]
    labels = taste + random.normal(size=1200) > 0
    ours, theirs = taste + random.normal(size=1200), taste + 3 * random.normal(size=1200)
    areas = []
    for _ in range(400):
        drawn = (random.integers(0, 300, 300)[:, None] * 4 + np.arange(4)).ravel()
        areas.append((auc(ours[drawn], labels[drawn]), auc(theirs[drawn], labels[drawn])))
    alone, gaps = np.array(areas)[:, 0], np.array(areas) @ [1, -1]
    for theirs_too, spread in ((None, alone.std()), (theirs, gaps.std())):
        found = difference_of_auc(ours, theirs_too, labels, users)
        assert found is not None
        assert (found.high - found.low) / 2 == pytest.approx(1.96 * spread, rel=0.15)
    assert difference_of_auc(ours, theirs, labels, users).p < 0.01  # type: ignore[union-attr]
    assert difference_of_auc(ours, ours, labels, users).mean == 0  # type: ignore[union-attr]
    assert difference_of_auc(ours, theirs, np.ones(1200, np.bool_), users) is None


def test_the_interval_knows_a_difference_from_noise() -> None:
    random = np.random.default_rng(0)
    base = random.random((5, 2000)) < 0.1
    better = base | (random.random((5, 2000)) < 0.03)
    found = difference(better, base)
    assert found.mean == pytest.approx((better.astype(float) - base).mean())
    assert 0 < found.low < found.mean < found.high
    assert found.p < 0.001
    noise = difference(random.random((5, 2000)) < 0.1, base)
    assert noise.low < 0 < noise.high
    assert noise.p > 0.01
    assert difference(base, base).p == 1
