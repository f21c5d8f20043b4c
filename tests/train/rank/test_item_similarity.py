"""Neighbours are counted as their formula says, however many pairs are counted at once."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from npu_gr.train.data import InteractionLog, build_log
from npu_gr.train.rank import item_similarity as module
from npu_gr.train.rank.item_similarity import SHRINK, count_neighbours
from tests.train.synthetic import planted


@pytest.fixture(scope="module")
def log() -> InteractionLog:
    return build_log(planted(num_events=9), [], "leave-one-out")


def by_definition(log: InteractionLog, most: int = 10**6) -> npt.NDArray[np.float64]:
    """Similarity of every pair, user by user."""
    had = []
    for start, trained in zip(log.starts.tolist(), log.num_trained.tolist(), strict=False):
        newest_first = dict.fromkeys(reversed(log.items[start : start + trained].tolist()))
        had.append(list(newest_first)[:most])
    users_of = np.bincount([item for items in had for item in items], minlength=log.num_items)
    table = np.zeros((log.num_items, log.num_items))
    for items in had:
        for one in items:
            for other in items:
                if one != other:
                    table[one, other] += 1 / math.sqrt(len(items))
    return table / (np.sqrt(np.outer(users_of, users_of)) + SHRINK)


def counted(log: InteractionLog) -> npt.NDArray[np.float64]:
    """The same table as it is counted."""
    found = count_neighbours(log)
    every = np.arange(log.num_items)
    return np.stack([found.means(np.array([item]), every) for item in every])


@pytest.mark.parametrize("at_once", [1, 50, 1 << 22])
def test_similarities_are_their_formula(
    log: InteractionLog, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(module, "PAIRS_AT_ONCE", at_once)
    np.testing.assert_allclose(counted(log), by_definition(log), rtol=1e-6)


def test_the_most_similar_are_kept(log: InteractionLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NEIGHBOURS", 3)
    found = count_neighbours(log)
    assert found.items.shape == (log.num_items, 3)
    for item, row in enumerate(by_definition(log)):
        best = [
            other
            for other in np.argsort(-row.round(12), kind="stable")[:3].tolist()
            if row[other] > 0
        ]
        assert found.items[item].tolist() == [-1] * (3 - len(best)) + sorted(best)


def test_of_a_user_with_too_many_items_the_last_ones_count(
    log: InteractionLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "USER_ITEMS", 4)
    np.testing.assert_allclose(counted(log), by_definition(log, most=4), rtol=1e-6)


def test_what_is_not_trained_on_is_not_counted(log: InteractionLog) -> None:
    shorter = replace(log, num_trained=log.num_trained - 1)
    changed = log.items.copy()
    changed[log.starts[:-1] + shorter.num_trained] = 7
    one, other = (count_neighbours(which) for which in (shorter, replace(shorter, items=changed)))
    assert np.array_equal(one.items, other.items)
    assert np.array_equal(one.similarity, other.similarity)
    assert not np.array_equal(one.similarity, count_neighbours(log).similarity)


def test_items_without_users_and_logs_without_pairs_have_none(log: InteractionLog) -> None:
    found = count_neighbours(replace(log, num_trained=np.ones(log.num_users, np.int64)))
    assert found.items.shape == (log.num_items, 0)


def test_of_a_log_with_too_many_pairs_fewer_items_of_a_user_count(
    log: InteractionLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "USER_ITEMS", 8)
    rows = zip(log.starts.tolist(), log.num_trained.tolist(), strict=False)
    num_items = np.array(
        [len(set(log.items[start : start + trained].tolist())) for start, trained in rows]
    )
    assert num_items.max() > 4
    # eight of each are too many
    monkeypatch.setattr(module, "MAX_PAIRS", (np.minimum(num_items, 4) ** 2).sum())
    np.testing.assert_allclose(counted(log), by_definition(log, most=4), rtol=1e-6)
